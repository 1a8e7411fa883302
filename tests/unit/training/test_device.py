"""Decisions and messages about GPUs; no GPU is needed."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron01.config import DistributedConfig, GPTModelConfig, GPTPretrainConfig, TrainingConfig
from megatron01.errors import UserError
from megatron01.training import trainer
from megatron01.training.trainer import decide_compilation, notes_on_device
from megatron01.utils.precision import products_in_tf32, uses_tf32

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Properties of a mocked GPU; a test may change them."""
    told = SimpleNamespace(capability=(9, 0), serves=True, name="NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: told.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: told.name)
    monkeypatch.setattr(trainer, "triton_serves", lambda device: told.serves)
    return told


def settings(torch_compile: bool | None = None, *, tp: int = 1, **training: Any) -> GPTPretrainConfig:
    return GPTPretrainConfig(
        model=GPTModelConfig(torch_compile=torch_compile),
        training=TrainingConfig(**training),
        distributed=DistributedConfig(tensor_model_parallel_size=tp),
    )


def group(device: torch.device, *others: str | None) -> Any:
    return SimpleNamespace(device=device, world_size=1, gather=lambda own: [own, *others])


@pytest.mark.parametrize(
    ("config", "device", "is_compiled"),
    [
        (settings(), GPU, True),
        (settings(), CPU, False),
        (settings(True), CPU, True),
        (settings(False), GPU, False),
        (settings(deterministic=True), GPU, False),
        (settings(tp=2), GPU, False),
        (settings(True, tp=2, deterministic=True), GPU, True),
    ],
)
def test_layers_are_compiled_on_gpus_unless_bits_count(
    config: GPTPretrainConfig, device: torch.device, is_compiled: bool, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.shutil, "which", lambda name: name)
    assert decide_compilation(config, group(device)) == (is_compiled, [])


def test_without_a_compiler_somewhere_no_rank_compiles_by_default(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.shutil, "which", lambda name: name)
    is_compiled, (note,) = decide_compilation(settings(), group(GPU, "no gcc on node7"))
    assert not is_compiled and note == "layers are not compiled: no gcc on node7"
    gpu.serves = False
    assert decide_compilation(settings(), group(GPU)) == (False, [])  # another note reports it
    monkeypatch.setattr(trainer.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"a compiler of C, and there is no .* or leave out --torch-compile"):
        decide_compilation(settings(True), group(GPU))


def test_a_gpu_that_the_kernels_do_not_serve_is_told_so(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert notes_on_device(settings(), GPU) == []
    gpu.serves, gpu.capability, gpu.name = False, (7, 5), "Tesla T4"
    monkeypatch.setattr(metadata, "version", lambda package: "3.4.0")
    (note,) = notes_on_device(settings(), GPU)
    assert "the GPU Tesla T4 (compute capability 7.5, triton 3.4.0, torch" in note and "many times as slow" in note


def test_more_replicas_than_gpus_are_told_that_they_compute_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (note,) = notes_on_device(settings(), CPU)
    assert "more replicas than GPUs, so all compute on CPUs" in note
    assert notes_on_device(GPTPretrainConfig(distributed=DistributedConfig(device="cpu")), CPU) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert notes_on_device(settings(), CPU) == []


def test_products_of_fp32_are_in_tf32_where_the_gpu_can(gpu: Any) -> None:
    assert uses_tf32("fp32", GPU, wanted=True) and not uses_tf32("fp32", GPU, wanted=False)
    assert not uses_tf32("bf16", GPU, wanted=True) and not uses_tf32("fp32", CPU, wanted=True)
    gpu.capability = (7, 0)
    assert not uses_tf32("fp32", GPU, wanted=True)
    with products_in_tf32(True):
        assert torch.get_float32_matmul_precision() == "high"
    with products_in_tf32(False):
        assert torch.get_float32_matmul_precision() == "highest"
