"""Fine-tuning of a pretrained BERT: ``megatron01 glue`` and ``megatron01 squad``.

pretrained  the model and tokenizer that runs start from
bench       training and evaluating one run
results     the folder of a sweep, and its tables
sweep       doing the runs of a sweep
glue        the tasks of GLUE; ``squad`` is SQuAD 1.1
"""
