"""Where a training step reads numbers from tensors: on a GPU, each would be a host sync."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron01.config import BertModelConfig, GPTModelConfig
from megatron01.data.bert import model_batch
from megatron01.models import GPT2, Bert
from megatron01.monitor.metrics import Meter
from megatron01.optim import LossScaler, LRSchedule, ZeroOneAdam
from megatron01.optim.gradients import DeferredNorm
from megatron01.parallel.process_groups import Progress
from megatron01.pretraining import BERT, GPT
from megatron01.training.step import LocalComputeTime, LossModule, training_step
from tests.distributed.harness import run_ranks
from tests.tiers import slow_after

STEPS = 40
SHAPE: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "make_vocab_size_divisible_by": 8,
}
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Reads(TorchDispatchMode):
    """Counts operations that read numbers from tensors."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in READS
        return function(*args, **(kwargs or {}))


def reads_by_kind(rank: int, size: int, model: str, precision: str) -> list[tuple[str, int, int]]:
    """For each step: its kind, the numbers read during it, and how many of those were deferred norms."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    tokens = torch.arange(16).view(2, 8) % 13
    network: torch.nn.Module
    if model == "gpt":
        network = GPT2(GPTModelConfig(**SHAPE), 13, seed=1)
        batch = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(2, 8)}
        forward_step: Any = GPT.forward_step
    else:
        network = Bert(BertModelConfig(**SHAPE), 13, seed=1, binary_head=True)
        ids = tokens.numpy()
        real = ids > 2
        samples = {"text": ids, "types": 0 * ids, "padding_mask": real, "labels": np.where(real, ids, -1)}
        samples = model_batch({**samples, "loss_mask": real, "is_random": ids[:, 0] % 2})
        batch = {name: torch.from_numpy(values.astype("int64")) for name, values in samples.items()}
        forward_step = BERT.forward_step
    network.to(dtype)
    optimizer = ZeroOneAdam(
        network.named_parameters(),
        LRSchedule(style="linear", peak_lr=1e-3, total_steps=STEPS),
        sync_policy="constant:4",
        variance_freeze_step=4,
        max_grad_norm=1.0,
        loss_scaler=LossScaler(initial=64.0, window=7) if precision == "fp16" else None,
        backend="reference",  # works on the parameters' device, as one on a GPU does
    )
    module = optimizer.attach(LossModule(network))
    watched: dict[str, Any] = {"local_compute_time": LocalComputeTime(tokens.device), "progress": Progress()}
    meter = Meter(parameters=1, tokens_per_step=1)
    known, read = 0, DeferredNorm.__float__

    def counted(norm: DeferredNorm) -> float:
        nonlocal known
        known += 1
        return read(norm)

    DeferredNorm.__float__ = counted  # type: ignore[method-assign]
    found = []
    for _ in range(STEPS):
        known = 0
        with Reads() as reads:
            losses = training_step(optimizer, module, forward_step, iter([batch, batch]), 2, **watched)
            report = optimizer.last_step
            assert report is not None
            meter.add(report, losses.pop("loss"), losses)
        found.append((report.planned_kind, reads.count, known))
    assert meter.run.steps_by_kind.keys() == {"full", "one_bit", "local"}
    return found


@pytest.mark.parametrize("model", slow_after(1, ["bert", "gpt"]))
@pytest.mark.parametrize("precision", slow_after(1, ["bf16", "fp16", "fp32"]))
def test_steps_without_a_mean_read_nothing_that_has_just_been_computed(model: str, precision: str) -> None:
    for steps in run_ranks(reads_by_kind, 2, model, precision):
        local = [(reads, known) for kind, reads, known in steps if kind == "local"]
        assert len(local) > STEPS // 2
        assert all(reads == known for reads, known in local), local
        # nor does a 1-bit step, except received headers and the compression watch's norms (``tolist``, not counted)
        one_bit = [reads - known for kind, reads, known in steps if kind == "one_bit"]
        assert len(one_bit) > 1 and not any(one_bit), one_bit


def test_local_steps_of_a_single_replica_read_nothing_that_has_just_been_computed() -> None:
    (steps,) = run_ranks(reads_by_kind, 1, "gpt", "bf16")
    local = [(reads, known) for kind, reads, known in steps if kind == "local"]
    assert len(local) > STEPS // 2 and all(reads == known for reads, known in local), local
