from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.config import OptimizerConfig
from megatron01.cost.volume import (
    FULL,
    LOCAL,
    ONE_BIT,
    Traffic,
    Wire,
    compare,
    full_step_bytes,
    packed_bytes,
    phase_of,
    traffic,
)
from megatron01.errors import UserError
from megatron01.optim import LRSchedule
from megatron01.optim.policies import VariancePolicy, build_sync_policy

WIRE = Wire(parameter_sizes=(4096, 8192, 2048), replicas=7, block_size=1024)
OPTIMIZERS = ("zero_one_adam", "one_bit_adam", "adam", "bin_sgdm", "soft_sign_sgd", "sgdm")


def plan(train_iters: int = 200, precision: Any = "bf16", wire: Wire = WIRE, **changes: Any) -> Traffic:
    config = OptimizerConfig(**{"lr": 1e-3, "lr_warmup_iters": 50, "gradient_wire_dtype": "bf16", **changes})
    return traffic(config, train_iters=train_iters, precision=precision, wire=wire)


def test_bytes_of_an_exchange_follow_the_formulas() -> None:
    elements, n = 14 * 1024, 7
    assert WIRE.parameters == elements
    assert WIRE.dense(2) == 2 * (n - 1) / n * elements * 2
    assert WIRE.quantized(1) == 2 * (n - 1) / n * elements * (1 / 8 + 2 / 1024)
    assert WIRE.quantized(1, scaled=False) == 2 * (n - 1) / n * elements / 8
    assert WIRE.ring(4) == 2 * (n - 1) / n * elements * 4


def test_bytes_of_an_element_have_their_share_of_a_scale() -> None:
    def config(**changes: Any) -> OptimizerConfig:
        return OptimizerConfig(**{"block_size": 1024, "gradient_wire_dtype": "bf16", **changes})

    assert packed_bytes(config()) == 1 / 8 + 2 / 1024 and packed_bytes(config(optimizer="bin_sgdm")) == 1 / 8
    assert packed_bytes(config(optimizer="one_bit_adam", compressor="none")) == 4
    assert full_step_bytes(config(), "fp32") == 2
    for bits, name in ((8, "8bit"), (4, "4bit")):
        element = full_step_bytes(config(gradient_wire_dtype=name), "fp32")
        assert element == bits / 8 + 2 / 1024
        assert WIRE.quantized(bits) == plan(gradient_wire_dtype=name).full_bytes == 2 * 6 / 7 * 14 * 1024 * element


def test_blocks_are_padded_per_parameter_and_to_equal_rows_but_not_on_the_ring() -> None:
    wire = Wire(parameter_sizes=(1, 1025, 1024), replicas=3, block_size=1024)  # 4 blocks, so 2 in each of 3 rows
    assert wire.dense(4) == 2 * 2 * 2 * 1024 * 4
    assert wire.quantized(1) == 2 * 2 * 2 * (128 + 2)
    assert wire.ring(4) == 2 * 2 * 2050 * 4 // 3


@pytest.mark.parametrize(
    ("optimizer", "precision", "expected"),
    [
        ("adam", "bf16", WIRE.ring(2)),
        ("adam", "fp32", WIRE.ring(4)),
        ("sgdm", "fp16", WIRE.dense(2)),
        ("sgdm", "fp32", WIRE.dense(4)),
        ("soft_sign_sgd", "bf16", WIRE.dense(4)),
        ("bin_sgdm", "bf16", WIRE.quantized(1, scaled=False)),
    ],
)
def test_optimizers_whose_steps_are_all_alike(optimizer: str, precision: str, expected: int) -> None:
    run = plan(optimizer=optimizer, precision=precision, gradient_wire_dtype="auto")
    assert (run.bytes_sent == expected).all() and (run.rounds == 1).all()
    assert (run.kind == (ONE_BIT if optimizer == "bin_sgdm" else FULL)).all()
    assert run.synchronizes.all() and (run.interval == 1).all()
    assert run.refreshes.all() == run.refreshes.any() == (optimizer == "adam")


def test_the_type_of_gradients_on_the_wire_can_be_set_except_for_adam() -> None:
    assert plan(optimizer="sgdm", precision="fp32", gradient_wire_dtype="bf16").bytes_sent[0] == WIRE.dense(2)
    assert plan(optimizer="adam", precision="fp32", gradient_wire_dtype="bf16").bytes_sent[0] == WIRE.ring(4)
    assert plan(precision="bf16", gradient_wire_dtype="fp32").bytes_sent[0] == WIRE.dense(4)
    # what soft_sign_sgd averages at full steps are no gradients
    assert plan(optimizer="soft_sign_sgd", gradient_wire_dtype="8bit").bytes_sent[0] == WIRE.dense(4)


def test_one_bit_adam_is_full_before_its_freeze_step_and_1_bit_after() -> None:
    run = plan(optimizer="one_bit_adam", freeze_step=30)
    assert run.bytes_sent.tolist() == [WIRE.dense(2)] * 30 + [WIRE.quantized(1)] * 170
    assert run.frozen_from == 30 and run.total_rounds == 200
    assert plan(optimizer="one_bit_adam", freeze_step=1000).bytes_sent.tolist() == [WIRE.dense(2)] * 200
    uncompressed = plan(optimizer="one_bit_adam", freeze_step=30, compressor="none")
    assert uncompressed.bytes_sent[30] == WIRE.dense(4)
    with pytest.raises(UserError, match="only training can tell; give --freeze-step"):
        plan(optimizer="one_bit_adam")


def test_zero_one_adam_pays_for_gradients_or_for_bits_or_for_nothing() -> None:
    decay = {"lr_decay_style": "exponential", "lr_decay_rate": 0.5, "lr_decay_interval": 40}
    run = plan(**decay, sync_policy="schedule", variance_kappa=4)
    prices = {FULL: WIRE.dense(2), ONE_BIT: WIRE.quantized(1), LOCAL: 0}
    assert run.bytes_sent.tolist() == [prices[kind] for kind in run.kind.tolist()]
    assert run.rounds.tolist() == [int(kind != LOCAL) for kind in run.kind.tolist()]
    assert run.frozen_from == 90 == np.argmax(run.interval > 1)
    assert run.total_bytes == run.bytes_sent.sum() and run.bits_per_parameter[0] == 8 * WIRE.dense(2) / WIRE.parameters


def test_a_refresh_amid_local_steps_costs_both_exchanges_when_it_synchronizes() -> None:
    run = plan(sync_policy="constant:3", variance_freeze_step=100, variance_kappa=2)
    both = run.refreshes & run.synchronizes & (np.arange(run.steps) > 10)
    assert both.any() and (run.rounds[both] == 2).all()
    assert (run.bytes_sent[both] == WIRE.dense(2) + WIRE.quantized(1)).all()


@given(
    text=st.sampled_from(["schedule", "schedule:2", "every", "constant:2", "constant:5", "doubling:7,9"]),
    style=st.sampled_from(["linear", "cosine", "exponential", "constant"]),
    kappa=st.integers(1, 6),
    freeze=st.integers(1, 80),
    warm_up=st.integers(0, 20),
    decay_end=st.integers(30, 90),
    at_once=st.sampled_from([7, 1000]),
)
def test_bits_are_exchanged_unless_replicas_agree_anyway(
    text: str, style: str, kappa: int, freeze: int, warm_up: int, decay_end: int, at_once: int
) -> None:
    with patch("megatron01.optim.specs.STEPS_AT_ONCE", at_once):
        run = plan(
            train_iters=70,
            sync_policy=text,
            lr_decay_style=style,
            lr_decay_iters=decay_end,
            lr_warmup_iters=warm_up,
            variance_kappa=kappa,
            variance_freeze_step=freeze,
            lr_decay_interval=6,
            lr_decay_rate=0.6,
        )
    policy = build_sync_policy(text, run.schedule, OptimizerConfig().max_sync_interval)
    variance = VariancePolicy(kappa, freeze, policy)
    steps = range(70)
    assert run.synchronizes.tolist() == [policy.synchronizes(step) for step in steps]
    assert run.interval.tolist() == [policy.interval(step) for step in steps]
    assert run.refreshes.tolist() == [variance.refreshes(step) for step in steps]
    moved = -1  # the last step that moved the master weights
    previous = -1
    for step in range(run.steps):
        exchanged = run.bytes_sent[step] - WIRE.dense(2) * run.refreshes[step]
        if run.synchronizes[step]:
            something = run.learning_rate[previous + 1 : step + 1].sum() > 0
            own_gradients = not run.refreshes[moved + 1 : step + 1].all()
            assert exchanged == (WIRE.quantized(1) if something and own_gradients else 0)
            previous = step
            moved = step if something else moved
        else:
            assert exchanged == 0
    assert run.synchronizes[-1]


@pytest.mark.parametrize("policy", ["schedule:2", "every", "doubling:1000,5000"])
def test_a_long_run_is_planned_without_a_look_at_each_step(policy: str) -> None:
    with patch.object(LRSchedule, "lr", autospec=True, side_effect=LRSchedule.lr) as rate:
        run = plan(train_iters=300_000, sync_policy=policy, lr_decay_style="cosine")
        assert phase_of(run, 0, run.steps).bytes_sent == run.total_bytes > 0
    assert rate.call_count < 1000


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_has_a_formula(optimizer: str) -> None:
    run = plan(optimizer=optimizer, freeze_step=20)
    assert run.steps == 200 and run.total_bytes > 0 and run.parameters == WIRE.parameters


def test_the_volume_of_a_huge_model_is_exact() -> None:
    """10**13 parameters send 80 TB a step with Adam; in 200,000 steps, more bytes than int64 counts."""
    wire = Wire(parameter_sizes=(10**13,), replicas=128, block_size=1024)
    config = OptimizerConfig(optimizer="adam", lr_warmup_iters=0)
    run = traffic(config, train_iters=200_000, precision="fp32", wire=wire)
    assert run.total_bytes == phase_of(run, 0, run.steps).bytes_sent == 200_000 * wire.ring(4) > 2**63
    others = compare(run, config, precision="fp32", wire=wire)
    assert [other.bytes_sent for other in others] == [200_000 * wire.ring(size) for size in (4, 2)]


def test_contradictions_are_the_users() -> None:
    with pytest.raises(UserError, match="sync_policy is 'often'"):
        plan(sync_policy="often")
    with pytest.raises(UserError, match="local steps from step 0 on"):
        plan(sync_policy="constant:2")
    config = OptimizerConfig(lr_warmup_iters=300)
    with pytest.raises(UserError, match="within the warm-up"):
        traffic(replace(config, lr=1.0), train_iters=200, precision="fp32", wire=WIRE)
