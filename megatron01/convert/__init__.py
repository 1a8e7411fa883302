"""Models in other people's formats: Hugging Face folders both ways, and Megatron-LM's files on the way in.

portable      a model between two formats, which every reader gives and every writer takes
huggingface   folders of transformers; ``hf_tokenizer`` their tokenizer files
megatron      checkpoints of Megatron-LM, through ``torch_files``
native        checkpoints of megatron01
formats       any of them, and ``megatron01 convert``
"""
