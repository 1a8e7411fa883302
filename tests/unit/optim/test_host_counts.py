"""Launches, collectives and host syncs per step, counted on a CPU for one of many ranks, with the GPU buckets of 345M.

The bounds are today's counts, and may only be lowered. There are at most eight buckets of gradients, and four of
accumulated steps. One takes ten launches and collectives in a 1-bit step, or seven with a flat exchange, for any number
of nodes; of gradients in 4 bits it takes as many, and of 16-bit gradients eight, or five. Where nodes are replicas,
1-bit steps average gradients inside the nodes as well, with four for each of their buckets, and seven for one of
accumulated steps. The rest of a step is mostly the gradient norm. An exchange has one host sync, before residuals
change: an exchange that is called off sends no results, and tensor-parallel ranks agree on it first. The checksums of
its results are read with the next one's headers. A full step also reads its gradient norm. Other norms are read a step
later, when the device has long computed them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron01.config.optimizer import default_bucket_elements
from megatron01.models import GPT2
from megatron01.optim import ZeroOneAdam, build_optimizer, build_schedule
from megatron01.optim.kernels.specification import TorchKernels
from tests.tiers import slow_after

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
PARAMETERS = 354_871_296
BLOCK = 32
OF_PROCESSES = {"one_bit": (10, 48, 1), "full": (10, 45, 3)}
"""By kind of step: most launches of a bucket (three less with a flat exchange), others, and host reads."""
DENSE = (38, 3)
"""Most launches that are not a bucket's, and most host reads, of a full step in 16 bits."""
OF_NODES = {
    "auto": {"full": (11, 0, 56, 3), "local": (4, 0, 34, 2), "one_bit": (4, 7, 51, 3)},
    "bf16": {"full": (9, 0, 44, 3)},
}
"""By wire type and kind of step: launches of a bucket of gradients, of a bucket of accumulated steps, others, and host
reads, where nodes of 8 are replicas."""


class KernelsAsOnGPU(TorchKernels):
    """Counts kernel calls, not their operations; a call handles a whole bucket, and the host runs ahead.

    Calls of codecs are counted, too; ``tests/unit/comm/test_triton_codec.py`` shows that each is one launch.
    """

    def __init__(self, device: torch.device, **_: Any) -> None:
        super().__init__(device)
        self.range_elements = 1 << 27


def count_steps(
    monkeypatch: pytest.MonkeyPatch,
    nodes: int,
    processes: int,
    *,
    wire: str = "auto",
    last: str = "one_bit",
    replica: str = "process",
    watch_interval: int = 0,
) -> tuple[dict[str, int], dict[str, Any]]:
    """The buckets, and the counts, of the last step of each kind, up to the kind ``last``."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("megatron01.optim.base.build_kernels", KernelsAsOnGPU)
    from counting import counted
    from simulated_replicas import loop_topology
    from workload import Workload

    workload = Workload(model="gpt2", size="345m", precision="bf16", steps=1)
    config = workload.config(block_size=BLOCK, watch_interval=watch_interval, gradient_wire_dtype=wire)
    model = GPT2(dataclasses.replace(config.model, hidden_size=64, max_position_embeddings=64), 500)
    model.to(torch.bfloat16)
    workload.set_random_gradients(model, 1.0)
    elements = sum(-(-parameter.numel() // BLOCK) * BLOCK for parameter in model.parameters())

    def scaled(_: int, *, on_gpu: bool, of_steps: bool = False) -> int:
        return -(-elements * default_bucket_elements(PARAMETERS, on_gpu=True, of_steps=of_steps) // PARAMETERS)

    for module in ("comm.payload", "optim.base"):
        monkeypatch.setattr(f"megatron01.{module}.default_bucket_elements", scaled)
    schedule = build_schedule(config.optimizer, workload.total_steps)
    topology = dataclasses.replace(loop_topology(nodes, processes), replica=replica)
    optimizer: Any = build_optimizer(model, config, schedule, topology)
    found = {}
    kinds = workload.kinds()
    for kind in kinds[: len(kinds) - kinds[::-1].index(last)]:
        with counted(optimizer) as counts:
            optimizer.step()
        assert optimizer.last_step.kind == kind
        found[kind] = counts
    buckets = {"full": len(optimizer._gradients.of_all.buckets), "one_bit": len(optimizer._exchange.exchange.buckets)}
    assert 6 <= buckets["full"] <= 8 and 3 <= buckets["one_bit"] <= 4
    return buckets, found


@pytest.mark.parametrize(("nodes", "processes"), slow_after(1, [(2, 8), (16, 8), (8, 1)]))
def test_a_step_asks_no_more_of_the_host_than_it_did(
    monkeypatch: pytest.MonkeyPatch, nodes: int, processes: int
) -> None:
    buckets, found = count_steps(monkeypatch, nodes, processes)
    for kind, (of_bucket, beside, host_reads) in OF_PROCESSES.items():
        counts = found[kind]
        of_buckets = (of_bucket - (3 if processes == 1 else 0)) * buckets[kind]
        assert counts.launches <= of_buckets + beside, (kind, counts)
        assert counts.host_reads <= host_reads and counts.late_reads <= 1, (kind, counts)
    local = found["local"]
    assert local.launches <= 35 and local.host_reads == 0 and local.collectives == 0, local
    assert local.late_reads <= 1, local


@pytest.mark.parametrize(("nodes", "processes"), slow_after(1, [(2, 8), (16, 8), (8, 1)]))
def test_a_full_step_in_16_bits_asks_less(monkeypatch: pytest.MonkeyPatch, nodes: int, processes: int) -> None:
    buckets, found = count_steps(monkeypatch, nodes, processes, wire="bf16", last="full")
    beside, host_reads = DENSE
    counts = found["full"]
    assert counts.launches <= (8 if processes > 1 else 5) * buckets["full"] + beside, counts
    assert counts.host_reads <= host_reads and counts.late_reads == 0, counts


@pytest.mark.parametrize(("nodes", "wire"), slow_after(2, [(2, "auto"), (16, "bf16"), (16, "auto")]))
def test_nodes_that_are_replicas_ask_the_same_however_many_they_are(
    monkeypatch: pytest.MonkeyPatch, nodes: int, wire: str
) -> None:
    last = "one_bit" if wire == "auto" else "full"
    buckets, found = count_steps(monkeypatch, nodes, 8, wire=wire, last=last, replica="node")
    for kind, (of_gradients, of_steps, beside, host_reads) in OF_NODES[wire].items():
        counts = found[kind]
        of_buckets = of_gradients * buckets["full"] + of_steps * buckets["one_bit"]
        assert counts.launches <= of_buckets + beside and counts.host_reads <= host_reads, (kind, counts)


def test_measuring_the_quantization_error_takes_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = count_steps(monkeypatch, 2, 8, watch_interval=1)
    assert found["one_bit"].host_reads <= OF_PROCESSES["one_bit"][2] + 1, found["one_bit"]


def test_masked_elements_are_written_back_without_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from counting import counted

    mask = torch.tensor([True, False] * 32)
    optimizer: Any = ZeroOneAdam([("weight", torch.nn.Parameter(torch.ones(64)))], 0.1, masks={"weight": mask})
    with counted(optimizer) as counts:
        optimizer._frozen_elements.restore(optimizer._local.x)
    assert counts.host_reads == 0 and counts.operations > 0


def test_reads_and_operations_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from counting import counted

    optimizer: Any = ZeroOneAdam([torch.nn.Parameter(torch.ones(64))], 0.1)
    values = torch.ones(4)
    with counted(optimizer) as counts:
        values.view(2, 2)[0].add_(1.0)  # views are free
        assert counts.operations == 1 and counts.host_reads == 0
        values[values > 1.0].sum().item()  # compare, host sync for the number of elements, sum, host sync
        assert counts.operations >= 4 and counts.host_reads == 2
        if values.any() and values.tolist() and float(values.max()):
            assert counts.host_reads == 5
        optimizer._kernels.sum_squares(torch.ones(64), 64)
        assert counts.kernels == 1
    assert "sum_squares" not in vars(optimizer._kernels)
