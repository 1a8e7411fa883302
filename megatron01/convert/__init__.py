"""Conversion of models: import and export of Hugging Face folders, import of Megatron-LM checkpoints.

portable      ``PortableModel``, which every reader returns and every writer takes
huggingface   folders of transformers; ``hf_tokenizer`` their tokenizer files
megatron      checkpoints of Megatron-LM, through ``torch_files``
native        checkpoints of megatron01
formats       detection of the format, ``load_model``, and ``megatron01 convert``
"""
