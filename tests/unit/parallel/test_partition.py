"""How parameters are sharded, and resharded for another tensor-parallel size."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron01.config import BertModelConfig, GPTModelConfig
from megatron01.models import GPT2, Bert
from megatron01.models.tensor_parallel import partitions_for
from megatron01.parallel.tensor_parallel import Partition


def pieces(whole: torch.Tensor, cut: Partition, num_parts: int) -> list[torch.Tensor]:
    parts = [torch.zeros(cut.shape(whole.shape, num_parts)) for _ in range(num_parts)]
    for number, part in enumerate(parts):
        cut.copy(whole, 0, part, number * part.shape[cut.dim])
    return parts


@given(
    units=st.integers(1, 9),
    unit=st.integers(1, 4),
    dim=st.integers(0, 1),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
)
def test_cutting_anew_loses_and_adds_nothing(units: int, unit: int, dim: int, before: int, after: int) -> None:
    cut = Partition(dim, unit)
    whole = torch.rand((units * unit, 3) if dim == 0 else (3, units * unit)) + 1.0
    saved = pieces(whole, cut, before)
    assert sum(float(part.count_nonzero()) for part in saved) == whole.numel()  # no element twice, the rest is padding
    for number, expected in enumerate(pieces(whole, cut, after)):
        part = torch.zeros_like(expected)
        for its_number, source in enumerate(saved):
            cut.copy(source, its_number * source.shape[dim], part, number * part.shape[dim])
        assert torch.equal(part, expected)
        assert part.shape[dim] % unit == 0


def test_a_vocabulary_is_padded_as_megatron_pads_it() -> None:
    cut = Partition(0, 128)
    assert cut.shape(torch.Size([50304, 8]), 1) == (50304, 8)
    assert cut.shape(torch.Size([50304, 8]), 2)[0] * 2 == 50432  # the next multiple of 128 x 2
    assert cut.shape(torch.Size([50304, 8]), 8)[0] * 8 == 51200


def test_norms_positions_and_biases_of_sums_are_held_whole() -> None:
    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    gpt = GPT2(GPTModelConfig(**shape), 10)
    bert = Bert(BertModelConfig(**shape), 10, binary_head=True)
    for model in (gpt, bert):
        names = [name for name, _ in model.named_parameters()]
        whole = set(names) - partitions_for(model.config, names).keys()
        layer = "transformer.layers.0."
        assert {f"{layer}attention.dense.bias", f"{layer}mlp.dense_4h_to_h.bias", f"{layer}mlp_norm.weight"} <= whole
        assert "embedding.position_embeddings.weight" in whole
        assert not any("query_key_value" in name or "h_to_4h" in name for name in whole)
    assert list(partitions_for(bert.config, ["lm_head.bias", "lm_head.dense.weight"])) == ["lm_head.bias"]
