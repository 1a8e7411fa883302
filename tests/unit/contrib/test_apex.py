"""NVIDIA's apex (mocked with torch), an unrelated package of the same name, and neither."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron01.config import GPTModelConfig, OptimizerConfig
from megatron01.errors import UserError
from megatron01.models import GPT2
from megatron01.models.layers import ApexLayerNorm
from megatron01.optim.adam import Adam
from megatron01.optim.schedule import LRSchedule

SHAPE = GPTModelConfig(
    num_layers=1, hidden_size=8, num_attention_heads=2, max_position_embeddings=8, make_vocab_size_divisible_by=8
)


class FusedAdam(torch.optim.AdamW):
    """Mock of apex's: it counts the steps of a param group, and keeps only the moments in the state."""

    def __init__(self, params, *, adam_w_mode, bias_correction, set_grad_none, **settings):
        assert adam_w_mode and bias_correction and not set_grad_none
        super().__init__(params, **settings)

    def step(self):
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                first, second = self.state[parameter]["exp_avg"], self.state[parameter]["exp_avg_sq"]
                (beta1, beta2), lr = group["betas"], group["lr"]
                first.lerp_(parameter.grad, 1 - beta1)
                second.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                root = (second / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                update = first / (1 - beta1 ** group["step"]) / root + group["weight_decay"] * parameter
                parameter.data.sub_(lr * update)


def put(monkeypatch, name: str, **contents) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    for key, value in contents.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def nvidia(monkeypatch):
    """Mock of NVIDIA's apex on a machine with a GPU."""
    put(monkeypatch, "apex")
    put(monkeypatch, "apex.normalization")
    put(monkeypatch, "apex.optimizers", FusedAdam=FusedAdam)
    put(monkeypatch, "fused_layer_norm_cuda")
    put(monkeypatch, "amp_C")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def unrelated(monkeypatch, tmp_path):
    """An unrelated package on the path that is called apex and imports one that is not installed."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("import pyramid_of_the_unrelated_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "apex", raising=False)


def norms(model) -> set[type]:
    return {type(module) for module in model.modules() if isinstance(module, torch.nn.LayerNorm)}


def build(choice) -> GPT2:
    return GPT2(dataclasses.replace(SHAPE, fused_layernorm=choice), 8)


def test_torch_is_the_default_wherever_apex_is(nvidia):
    assert norms(GPT2(SHAPE, 8)) == {torch.nn.LayerNorm}
    assert isinstance(adam("torch")._adam, torch.optim.AdamW)


@pytest.mark.parametrize("choice", ["apex", "auto"])
def test_norms_have_the_same_parameters_and_names(nvidia, choice):
    fused, plain = build(choice), build("torch")
    assert norms(fused) == {ApexLayerNorm}
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(fused.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    ids = torch.arange(6)[None]
    assert torch.equal(fused.eval()(ids), plain.eval()(ids))  # on a CPU


def test_apexes_kernel_is_called_for_what_is_on_a_gpu(nvidia, monkeypatch):
    seen = []

    def fused_layer_norm_affine(hidden, weight, bias, shape, eps):
        seen.append((tuple(shape), eps))
        return hidden

    put(monkeypatch, "apex.normalization.fused_layer_norm", fused_layer_norm_affine=fused_layer_norm_affine)
    norm = ApexLayerNorm(8, eps=1e-3)

    class OnGPU:
        is_cuda = True

    hidden = OnGPU()
    assert norm.forward(hidden) is hidden
    assert seen == [((8,), 1e-3)]


def adam(choice, seed: int = 0) -> Adam:
    torch.manual_seed(seed)
    model = torch.nn.Linear(5, 3)
    schedule = LRSchedule(style="cosine", peak_lr=1e-2, min_lr=1e-3, warmup_steps=2, total_steps=50)
    groups = [
        {"params": [("weight", model.weight)], "weight_decay": 0.1},
        {"params": [("bias", model.bias)], "weight_decay": 0.0},
    ]
    return Adam(groups, schedule, fused_adam=choice)


def train(optimizer: Adam, steps: int) -> None:
    for step in range(optimizer.step_count, optimizer.step_count + steps):
        for name, parameter in optimizer._weights.items():
            generator = torch.Generator().manual_seed(step)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            if name == "bias" and step == 0:
                parameter.grad = None
        optimizer.step()


def assert_close(one: Adam, other: Adam) -> None:
    for name, tensor in one.replicated_state().items():
        torch.testing.assert_close(other.replicated_state()[name], tensor, rtol=1e-5, atol=1e-6)


def test_adam_computes_the_same_and_its_state_changes_hands(nvidia, monkeypatch):
    fused, plain, onward = adam("apex"), adam("torch"), adam("apex", seed=1)
    monkeypatch.undo()  # AdamW of a torch with CUDA would ask the GPU that is mocked
    assert not isinstance(fused._adam, torch.optim.AdamW)
    for optimizer in (fused, plain):
        train(optimizer, 7)
    assert_close(fused, plain)
    assert torch.equal(fused.replica_state()["scalars"], plain.replica_state()["scalars"])
    onward.load_state(plain.replicated_state(), plain.replica_state())
    for optimizer in (onward, plain):
        train(optimizer, 5)
    assert_close(onward, plain)


@pytest.mark.parametrize("make", [build, adam])
def test_the_unrelated_package_is_refused_with_a_sentence(unrelated, make):
    with pytest.raises(UserError, match=r"not NVIDIA's but an unrelated one of that name, the one on PyPI; remove it"):
        make("apex")
    make("auto")


@pytest.mark.parametrize("make", [build, adam])
@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("apex", r"apex is not installed; install NVIDIA's .*, or give --fused-\w+ torch"),
        ("extension", r"without (amp_C|fused_layer_norm_cuda)"),
        ("gpu", "torch sees no GPU"),
    ],
)
def test_what_is_missing_is_named(nvidia, monkeypatch, make, missing, message):
    if missing == "apex":
        for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
            monkeypatch.delitem(sys.modules, name)
    elif missing == "extension":
        for name in ("amp_C", "fused_layer_norm_cuda"):
            monkeypatch.delitem(sys.modules, name)
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=message):
        make("apex")
    make("auto")


def test_the_setting_is_for_adam_alone():
    with pytest.raises(UserError, match="fused_adam is apex, which is for optimizer adam, but optimizer is sgdm"):
        OptimizerConfig(optimizer="sgdm", fused_adam="apex")
    assert OptimizerConfig(optimizer="adam", fused_adam="auto").fused_adam == "auto"


def test_it_is_no_dependency():
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert "apex" not in project
