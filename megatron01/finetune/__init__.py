"""How well a trained BERT fine-tunes: sweeps over the GLUE tasks and SQuAD 1.1."""
