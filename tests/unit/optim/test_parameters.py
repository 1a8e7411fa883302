"""Parameters that an optimizer on flat buffers cannot handle: refused with a one-line error before any step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

from megatron01.errors import UserError
from megatron01.optim import ZeroOneAdam, flat_parameters
from megatron01.optim.flat_parameters import FlatParameters, NamedParameter


def tied() -> nn.Module:
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 5), "head": nn.Linear(5, 7, bias=False)})
    model["head"].weight = model["embedding"].weight  # type: ignore[assignment]
    return model


def test_tied_weights_come_once() -> None:
    optimizer = ZeroOneAdam(tied().named_parameters(), 0.1)
    assert optimizer.flat_order == ["embedding.weight"]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning")  # raised by torch
def test_a_parameter_under_two_names() -> None:
    with pytest.raises(UserError, match=r"embedding\.weight and head\.weight share memory"):
        ZeroOneAdam(tied().named_parameters(remove_duplicate=False), 0.1)


def test_parameters_that_share_part_of_their_memory() -> None:
    memory = torch.zeros(20)
    parts = [("a", nn.Parameter(memory[:12])), ("b", nn.Parameter(memory[8:]))]
    with pytest.raises(UserError, match="a and b share memory"):
        ZeroOneAdam(parts, 0.1)
    ZeroOneAdam([("a", nn.Parameter(memory[:12])), ("b", nn.Parameter(memory[12:]))], 0.1)


def test_a_model_that_is_moved_to_another_device() -> None:
    layout = FlatParameters([NamedParameter("weight", nn.Parameter(torch.ones(3)), 0)], 32)
    layout.check_unchanged()
    layout.device = torch.device("meta")  # as if the optimizer had been built there
    with pytest.raises(UserError, match="weight was on meta when the optimizer was built, and is on cpu now"):
        layout.check_unchanged()


def state_of(names: list[str]) -> dict[str, Any]:
    return ZeroOneAdam([(name, nn.Parameter(torch.ones(3))) for name in names], 0.1).state_dict()


def test_the_state_of_another_optimizer() -> None:
    model = nn.Linear(3, 2)
    optimizer = ZeroOneAdam(model.named_parameters(), 0.1)
    with pytest.raises(
        UserError,
        match=r"lacks \['owner', 'replica', 'replicated'\]; expected what state_dict\(\) or .* of ZeroOneAdam",
    ):
        optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())


def test_the_state_of_the_same_parameters_in_another_order() -> None:
    optimizer = ZeroOneAdam([(name, nn.Parameter(torch.ones(3))) for name in ("a", "b")], 0.1)
    optimizer.load_state_dict(state_of(["a", "b"]))
    with pytest.raises(UserError, match="the state has parameter b where the model has a"):
        optimizer.load_state_dict(state_of(["b", "a"]))


def test_a_model_with_an_optimizer_is_saved_like_one_without(tmp_path: Path) -> None:
    """Each parameter's storage is its own, although all lie in one buffer: nothing passes for tied or partial."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Conv2d(3, 4, 1).to(memory_format=torch.channels_last))
    ZeroOneAdam(model.named_parameters(), 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_model(model, str(tmp_path / "model.safetensors"))
    load_model(model, str(tmp_path / "model.safetensors"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.save(model[0].bias, tmp_path / "bias.pt")
    assert (tmp_path / "bias.pt").stat().st_size < 3000
    assert model[1].weight.stride() == before["1.weight"].stride()


@pytest.mark.parametrize("together", [0, 60, 1 << 20])
def test_gradients_copied_together_are_the_same(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """As on a GPU, where the gradients of several parameters are copied to the buffer by one launch."""
    monkeypatch.setitem(flat_parameters._COPIED_TOGETHER, "cpu", together)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2))
    optimizer = ZeroOneAdam(model.named_parameters(), 0.1)
    batches = torch.randn(2, 7, 3)
    for batch in batches:  # the second is added to the first
        model(batch).square().sum().backward()
        model[1].weight.grad.mul_(2.0)  # type: ignore[union-attr, operator]  # before they are copied, or in their views
    expected = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    optimizer._flat.gather_gradients()
    for index, gradient in enumerate(expected):
        assert torch.equal(optimizer._flat.gradient(index), gradient)
        assert torch.equal(optimizer.param_groups[0]["params"][index].grad, gradient)
    assert not optimizer._flat.whole_gradients.masked_fill(  # type: ignore[union-attr]
        torch.cat([torch.arange(1024) < p.numel() for p in model.parameters()]), 0.0
    ).any()
    optimizer.zero_grad()
    model[0](batches[0]).sum().backward()  # the others have none
    optimizer._flat.gather_gradients()
    assert not optimizer._flat.gradient(2).any() and optimizer._flat.gradient(1).eq(7.0).all()
