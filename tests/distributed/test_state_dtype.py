"""All state but the master weights in bf16: as in fp32, on one node and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron01.comm import Topology
from megatron01.config import OptimizerConfig, PretrainConfig
from megatron01.errors import UserError
from megatron01.optim import LRSchedule, ZeroOneAdam
from tests.distributed.topologies import Case, over_gloo
from tests.tiers import slow_after
from tests.unit.comm.buffers import bits_of

SIZES, DTYPES, BLOCK = (185, 70, 81), (torch.float32, torch.bfloat16, torch.float16), 64
NARROW = {"v", "m", "u", "worker_error", "server_error"}
Buffers = dict[str, torch.Tensor]


def build(topology: Topology | None, **options: Any) -> tuple[list[torch.nn.Parameter], ZeroOneAdam]:
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype))
        for size, dtype in zip(SIZES, DTYPES, strict=True)
    ]
    schedule = LRSchedule(style="cosine", peak_lr=1e-2, warmup_steps=3, total_steps=40)
    common: dict[str, Any] = {"state_dtype": torch.bfloat16, "block_size": BLOCK, "bucket_elements": 4 * BLOCK}
    return parameters, ZeroOneAdam(parameters, schedule, process_group=topology, **(common | options))


def train(parameters: list[torch.nn.Parameter], optimizer: ZeroOneAdam, rank: int, steps: int) -> None:
    for _ in range(steps):
        generator = torch.Generator().manual_seed(100 * optimizer.step_count + rank)
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = (parameter.detach() + noise).to(parameter.dtype)
        optimizer.step()


def weights(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    return torch.cat([parameter.detach().float() for parameter in parameters])


def state(optimizer: ZeroOneAdam) -> Buffers:
    return {key: buffer.clone() for key, buffer in (optimizer.replicated_state() | optimizer.replica_state()).items()}


def same(ours: Buffers, theirs: Buffers) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(bits_of(ours[key]), bits_of(theirs[key])) for key in ours)


def of_both_backends(topology: Topology, options: dict[str, Any]) -> list[str]:
    return [*outcomes(topology, options), *outcomes(topology, options | {"backend": "reference"})]


def outcomes(topology: Topology, options: dict[str, Any]) -> list[str]:
    """Fingerprints after each step."""
    rank = topology.world.rank
    parameters, optimizer = build(topology, **options)
    fingerprints = []
    for _ in range(31):
        train(parameters, optimizer, rank, 1)
        fingerprints.append(optimizer.fingerprint())
    found = state(optimizer)
    for key, buffer in found.items():
        assert buffer.dtype is (torch.bfloat16 if key in NARROW else buffer.dtype), key
    assert found["x"].dtype is torch.float32 and found["m"].any() and found["u"].any()

    # the model's weights are restored from the state, bit-identical
    before = weights(parameters)
    with optimizer.replicated_weights():
        assert not torch.equal(weights(parameters), before)
    assert torch.equal(weights(parameters), before)

    # another optimizer that loads the state continues like this one
    others, resumed = build(topology, **options)
    resumed.load_state_dict({key: buffer for key, buffer in optimizer.state_dict().items()})
    assert torch.equal(weights(others), before)
    for each in ((parameters, optimizer), (others, resumed)):
        train(*each, rank, 8)
    assert same(state(resumed), state(optimizer))
    return [*fingerprints, optimizer.fingerprint()]


@pytest.mark.parametrize(
    "options",
    [{}, {"compressor": "none"}],
    ids=["flat", "no bits"],
)
def test_replicas_agree_to_the_bit(options: dict[str, Any]) -> None:
    first, *others = over_gloo(Case(of_both_backends, 2, (options,)))
    assert all(other == first for other in others)


@pytest.mark.parametrize("replica", slow_after(1, ["node", "process"]))
def test_a_hierarchy_too(replica: str) -> None:
    first, *others = over_gloo(Case(of_both_backends, 4, ({},), local_world_size=2, settings={"replica": replica}))
    assert all(other == first for other in others)


def test_a_state_is_taken_over_in_another_type() -> None:
    parameters, wide = build(None, state_dtype=torch.float32)
    train(parameters, wide, 0, 30)
    others, narrow = build(None)
    narrow.load_state(wide.replicated_state(), wide.replica_state())
    for key, buffer in state(narrow).items():
        assert torch.equal(buffer, state(wide)[key].to(buffer.dtype)), key
    parameters, widened = build(None, state_dtype=torch.float32)
    widened.load_state(narrow.replicated_state(), narrow.replica_state())
    assert all(torch.equal(buffer, state(narrow)[key].to(buffer.dtype)) for key, buffer in state(widened).items())
    assert torch.equal(weights(parameters), weights(others))


@pytest.mark.parametrize("options", [{"variance_decay": "per_refresh"}, {"variance_kappa": 65}])
def test_a_second_moment_that_bf16_cannot_follow_is_refused(options: dict[str, Any]) -> None:
    tensor = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UserError, match="with state_dtype bf16, expected elapsed and 64 at most"):
        ZeroOneAdam([tensor], 0.1, state_dtype=torch.bfloat16, **options)
    ZeroOneAdam([tensor], 0.1, state_dtype=torch.bfloat16, variance_kappa=64)


def test_what_has_no_such_state_is_refused() -> None:
    tensor = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UserError, match=r"state_dtype is torch\.float16; expected float32 or bfloat16"):
        ZeroOneAdam([tensor], 0.1, state_dtype=torch.float16)
    with pytest.raises(UserError, match="which is for optimizer zero_one_adam, but optimizer is one_bit_adam"):
        OptimizerConfig(optimizer="one_bit_adam", state_dtype="bf16")
    with pytest.raises(UserError, match="auto may choose adam, whose state is fp32"):
        PretrainConfig(optimizer=OptimizerConfig(auto=True, state_dtype="bf16"))
