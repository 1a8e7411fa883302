"""Trained models at work: ``megatron01 generate``, ``fill-mask`` and ``perplexity``.

generation  text from a GPT-2, tokens for the masks of a BERT
perplexity  how well a GPT-2 predicts held-out text
commands    what the program prints of both
"""
