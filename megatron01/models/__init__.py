"""BERT and GPT-2. Data parallelism wraps a model from outside; ``tensor_parallel`` partitions one."""

from megatron01.models.base import padded_vocab_size
from megatron01.models.bert import Bert, BertOutput
from megatron01.models.gpt2 import GPT2

__all__ = ["GPT2", "Bert", "BertOutput", "padded_vocab_size"]
