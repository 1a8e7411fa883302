"""BERT and GPT-2 pretraining with compressed data-parallel optimizers; 0/1 Adam by default."""

__version__ = "0.1.0"
