"""Fine-tuning of a pretrained BERT: ``megatron01 glue`` and ``megatron01 squad``.

sweep       the runs of a sweep, and the folder that keeps their results
pretrained  the model and tokenizer that runs start from
bench       training and evaluating one run
report      tables of results
glue        the tasks of GLUE; ``squad`` is SQuAD 1.1
"""
