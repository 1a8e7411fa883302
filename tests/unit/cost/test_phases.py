from __future__ import annotations

from typing import Any

import pytest

from megatron01.config import OptimizerConfig
from megatron01.cost.volume import Traffic, Wire, compare, phase_of, phases, traffic

WIRE = Wire(parameter_sizes=(1024, 2048), replicas=3, block_size=1024)


def plan(**changes: Any) -> tuple[Traffic, OptimizerConfig]:
    config = OptimizerConfig(
        **{
            "lr": 1e-3,
            "lr_warmup_iters": 50,
            "lr_decay_style": "exponential",
            "lr_decay_rate": 0.5,
            "lr_decay_interval": 40,
            "max_sync_interval": 4,
            **changes,
        }
    )
    return traffic(config, train_iters=200, precision="bf16", wire=WIRE), config


def test_phases_cover_the_run_and_add_up_to_it() -> None:
    run, _ = plan(sync_policy="doubling:60,40", variance_freeze_step=30, variance_kappa=4)
    parts = phases(run)
    assert [(part.first, part.last, part.interval) for part in parts] == [
        (0, 29, 1),
        (30, 99, 1),
        (100, 139, 2),
        (140, 199, 4),
    ]
    total = phase_of(run, 0, run.steps)
    for name in ("full", "one_bit", "local", "rounds", "bytes_sent", "steps"):
        assert sum(getattr(part, name) for part in parts) == getattr(total, name)
    assert total.steps == 200 and total.bytes_sent == run.total_bytes
    assert total.bits == pytest.approx(run.bits_per_parameter.mean())
    assert [part.full for part in parts[1:]] == [0, 0, 0]
    assert (parts[0].first_lr, parts[0].last_lr) == (0.0, run.learning_rate[29])


def test_a_phase_ends_where_the_second_moment_is_frozen_and_nowhere_else_before_local_steps() -> None:
    assert [part.first for part in phases(plan(sync_policy="schedule")[0])] == [0, 90, 130]
    assert [part.first for part in phases(plan(optimizer="one_bit_adam", freeze_step=70)[0])] == [0, 70]
    assert [part.first for part in phases(plan(optimizer="one_bit_adam", freeze_step=700)[0])] == [0]
    assert [part.first for part in phases(plan(optimizer="adam")[0])] == [0]
    assert [part.first for part in phases(plan(variance_freeze_step=700, sync_policy="every")[0])] == [0]


def test_a_run_is_compared_with_adam_and_with_1_bit_adam_if_its_freeze_step_is_known() -> None:
    run, config = plan()
    adam = ["Adam, fp32 gradients", "Adam, 16-bit gradients"]
    assert [other.name for other in compare(run, config, precision="bf16", wire=WIRE)] == adam
    run, config = plan(freeze_step=20, compressor="none")
    compared = compare(run, config, precision="bf16", wire=WIRE)
    assert [other.name for other in compared] == [*adam, "1-bit Adam, 20 full steps"]
    sent = 20 * WIRE.dense(2) + 180 * WIRE.quantized(1)
    assert [other.bytes_sent for other in compared] == [200 * WIRE.ring(4), 200 * WIRE.ring(2), sent]
    assert all(other.volume_saved == pytest.approx(1 - 1 / other.times_less) for other in compared)
    assert all(other.rounds_saved == 1 - run.total_rounds / 200 for other in compared)
    run, config = plan(optimizer="one_bit_adam", freeze_step=20)  # not with itself
    assert [other.name for other in compare(run, config, precision="bf16", wire=WIRE)] == adam
