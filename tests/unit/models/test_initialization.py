from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from megatron01.models import GPT2, Bert

STD = 0.2


def build(gpt_config, bert_config, kind: str, *, vocab_size: int = 53, seed: int = 1234, **changes):
    if kind == "gpt2":
        return GPT2(gpt_config(**changes), vocab_size, seed=seed)
    return Bert(bert_config(norm_placement=kind, **changes), vocab_size, binary_head=True, seed=seed)


KINDS = pytest.mark.parametrize("kind", ["gpt2", "post", "pre"])


@KINDS
def test_statistics(gpt_config, bert_config, kind):
    num_layers = 2
    model = build(gpt_config, bert_config, kind, hidden_size=96, num_attention_heads=4, num_layers=num_layers)
    seen = {"zero": 0, "one": 0, "std": 0, "scaled": 0}
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
            seen["zero"] += 1
        elif "norm" in name:
            assert parameter.eq(1).all(), name
            seen["one"] += 1
        else:
            scaled = "attention.dense" in name or "dense_4h_to_h" in name
            expected = STD / math.sqrt(2 * num_layers) if scaled else STD
            values = parameter[:53] if "word_embeddings" in name else parameter
            tolerance = 5 * expected / math.sqrt(values.numel())  # 5 standard errors
            assert abs(values.mean().item()) < tolerance, name
            assert abs(values.std().item() - expected) < tolerance, name
            seen["scaled" if scaled else "std"] += 1
    assert seen["scaled"] == 2 * num_layers and min(seen.values()) > 0


@KINDS
def test_depends_on_the_seed_alone(gpt_config, bert_config, kind):
    torch.manual_seed(1)
    first = build(gpt_config, bert_config, kind)
    torch.manual_seed(2)
    state_before = torch.get_rng_state()
    second = build(gpt_config, bert_config, kind)
    assert torch.equal(torch.get_rng_state(), state_before), "construction must leave the global random state alone"
    other = build(gpt_config, bert_config, kind, seed=7)
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.ndim == 1 or not torch.equal(a, c), name


def test_default_dtype_and_padding_change_no_weight(gpt_config):
    reference = GPT2(gpt_config(), 53)
    unpadded = GPT2(gpt_config(make_vocab_size_divisible_by=1), 53)
    assert reference.embedding.word_embeddings.weight.shape[0] == 64
    assert reference.embedding.word_embeddings.weight[53:].eq(0).all()
    torch.set_default_dtype(torch.bfloat16)
    try:
        rounded = GPT2(gpt_config(), 53)
    finally:
        torch.set_default_dtype(torch.float32)
    for (name, a), b, c in zip(reference.named_parameters(), unpadded.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a[:53], b[:53]), name
        assert c.dtype == torch.bfloat16 and torch.equal(a.bfloat16(), c), name


NEW_MODELS = """
import sys
import torch
from megatron01.config import BertModelConfig, GPTModelConfig
from megatron01.models import GPT2, Bert
before = set(sys.modules)
sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
with torch.device("meta"):
    GPT2(GPTModelConfig(**sizes), 10)
    Bert(BertModelConfig(**sizes), 10, binary_head=True)
loaded = set(sys.modules) - before
assert not loaded & {"torch._dynamo", "torch.fx.experimental.symbolic_shapes"}, loaded
"""


def test_a_model_without_memory_does_not_load_the_compiler():
    """Which would take most of the start of ``generate``, ``plan`` and the like."""
    subprocess.run([sys.executable, "-c", NEW_MODELS], check=True)
