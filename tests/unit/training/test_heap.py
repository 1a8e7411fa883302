"""Memory of freed tensors: the passes of a model take no more memory than their tensors."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import multiprocessing
import platform
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron01.config import GPTPretrainConfig, TrainingConfig
from megatron01.cost.memory import gives_back_freed_blocks, pass_bytes
from megatron01.models import GPT2
from megatron01.training.memory_check import give_back_freed_blocks

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep memory differently")


def config_with(recompute: Any, *, num_layers: int = 4, batch: int = 20) -> GPTPretrainConfig:
    """Hidden states of 1.3 MB each, which is more than a large block."""
    default = GPTPretrainConfig()
    model = dataclasses.replace(
        default.model,
        num_layers=num_layers,
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=128,
        recompute_activations=recompute,
    )
    data = dataclasses.replace(default.data, seq_length=128)
    return GPTPretrainConfig(model=model, data=data, training=TrainingConfig(micro_batch_size=batch, train_iters=1))


def pass_through(config: GPTPretrainConfig) -> GPT2:
    """A model after its forward and backward pass."""
    model = GPT2(config.model, 500)
    tokens = torch.zeros(config.training.micro_batch_size, config.data.seq_length, dtype=torch.int64)
    model.loss(tokens, tokens, torch.ones(tokens.shape)).backward()
    return model


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def peak_and_plan(config: GPTPretrainConfig) -> tuple[int, int]:
    """Bytes by which a model and its passes grow this process, and the bytes planned for the passes."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = GPT2(config.model, 500)
    planned = pass_bytes(config, model, on_gpu=False, micro_batches=1)
    torch.ones(1 << 24).sum()  # freeing it raises glibc's dynamic threshold to its maximum
    if gives_back_freed_blocks(config.model, "cpu"):
        give_back_freed_blocks()
    pass_through(config_with("none", num_layers=1, batch=1))  # loads the libraries' kernels
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    model = pass_through(config)
    model = pass_through(config)  # while the first one's weights and gradients exist
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return resident("VmHWM") - before, 3 * weights + planned.peak + planned.unused


@pytest.mark.slow
@needs_glibc
def test_passes_that_recompute_take_what_is_planned() -> None:
    """Where glibc keeps freed blocks, they take twice as much, in holes of its heap."""
    # in another process, as all tests in this one share its allocator
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        peak, planned = pool.submit(peak_and_plan, config_with("full")).result()
    assert peak == pytest.approx(planned, rel=0.15)


@needs_glibc
def test_what_a_user_asked_of_glibc_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("the allocator's settings were touched"))
    with monkeypatch.context() as environment:
        environment.setenv("MALLOC_MMAP_THRESHOLD_", "4194304")
        give_back_freed_blocks()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=4194304")
    give_back_freed_blocks()


def test_only_who_recomputes_on_a_cpu_pays_for_it() -> None:
    for recompute in ("none", "full", "selective"):
        model = config_with(recompute).model
        assert gives_back_freed_blocks(model, "cpu") == (recompute != "none")
        assert not gives_back_freed_blocks(model, "cuda")
