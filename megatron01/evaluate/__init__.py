"""Inference with trained models: ``megatron01 generate``, ``fill-mask`` and ``perplexity``.

generation  text generation with GPT-2, mask filling with BERT
perplexity  perplexity of GPT-2 on held-out text
commands    the commands
"""
