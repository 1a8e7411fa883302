"""BERT and GPT-2. No module here communicates: data parallelism wraps a model from outside."""

from megatron01.models.bert import Bert, BertOutput
from megatron01.models.gpt2 import GPT2
from megatron01.models.sizes import padded_vocab_size

__all__ = ["GPT2", "Bert", "BertOutput", "padded_vocab_size"]
