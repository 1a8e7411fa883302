"""Fine-tuning of a pretrained BERT: ``megatron01 glue`` and ``megatron01 squad``.

pretrained  the pretrained model and tokenizer
bench       training and evaluation of one run
results     result folder of a sweep, and its tables
sweep       executes the runs of a sweep
glue        the tasks of GLUE; ``squad`` is SQuAD 1.1
"""
