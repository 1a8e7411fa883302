"""A few faults; ``campaign`` draws as many as are asked for, and those that need root."""

from __future__ import annotations

import random

import pytest
import torch

from tests.faults import plans
from tests.faults.campaign import Laboratory
from tests.faults.injection import DamageData, FlipReceived, FlipWeight, Hang, Injection, Kill, Stop, WaitWithoutEnd
from tests.faults.plans import Kind, Plan
from tests.faults.settings import SAVED_EVERY, Setting


@pytest.fixture(scope="module")
def laboratory(pool, tmp_path_factory):
    with Laboratory(tmp_path_factory.mktemp("laboratory"), pool) as made:
        yield made


def killed(rank, place, call, when="before"):
    return lambda stage: Plan(place, {rank: [Injection(Kill(), place, call, when)]}, dead={rank})


def stopped(stage):
    return Plan("", {1: [Injection(Stop(None), "an all-to-all", 3)]}, stopped={1})


def hung(stage):
    return Plan("", {1: [Injection(Hang(), "a step", 4)]}, must_say=NOBODY_ANSWERS)


def under_nccl(action, place, call, **plan):
    """Rank 1 is lost, and payload collectives that wait for it block for ever."""

    def draw(stage):
        injections = {rank: [WaitWithoutEnd()] for rank in range(stage.setting.world_size)}
        injections[1].append(Injection(action, place, call))
        return Plan("", injections, **plan)

    return draw


def over_nccl(action, place, call, **plan):
    """Rank 1 is lost, on two GPUs."""
    changes = {"distributed_backend": "nccl"}
    injections = {1: [Injection(action, place, call)]}
    return lambda stage: Plan("", injections, changes=changes, same_bits=False, **plan)  # not those of a CPU


def bit_on_the_wire(stage):
    return Plan("", {1: [Injection(FlipReceived(-5, 2), "an all-gather", 9, "after")]}, must_say="checksum")


def bit_in_the_weights(stage):
    return Plan("", {0: [Injection(FlipWeight("x", 5, 20), "a step", 9)]}, must_say="differs from replica 0")


def data_cut_short(stage):
    path = stage.corpus / "gpt.bin"
    content = path.read_bytes()
    injections = {1: [Injection(DamageData(path, "is cut short"), "a step", 7)]}
    return Plan("", injections, must_say="gpt.bin was changed", mend=lambda: path.write_bytes(content))


NOBODY_ANSWERS = "no answer from rank 1 on"
STUCK = "for rank 1 on"
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, for NCCL")


@pytest.mark.parametrize(
    ("draw", "lost"),
    [
        pytest.param(killed(1, "the backward pass", 7), 2, id="killed in the backward pass"),
        pytest.param(killed(0, "saving", 1, "inside"), None, id="killed while saving", marks=pytest.mark.slow),
        pytest.param(stopped, None, id="stopped", marks=pytest.mark.slow),
        pytest.param(hung, None, id="hung", marks=pytest.mark.slow),
        pytest.param(
            under_nccl(Kill(), "an all-to-all", 7, dead={1}, must_say=NOBODY_ANSWERS), None, id="killed, endless"
        ),
        pytest.param(
            under_nccl(Stop(None), "an all-gather", 7, stopped={1}, must_say=NOBODY_ANSWERS),
            None,
            id="stopped, endless",
            marks=pytest.mark.slow,
        ),
        pytest.param(under_nccl(Hang(), "a step", 4, must_say=STUCK), None, id="hung, endless", marks=pytest.mark.slow),
        pytest.param(
            over_nccl(Kill(), "an all-to-all", 7, dead={1}, must_say=NOBODY_ANSWERS),
            None,
            id="killed, NCCL",
            marks=TWO_GPUS,
        ),
        pytest.param(over_nccl(Hang(), "a step", 4, must_say=STUCK), None, id="hung, NCCL", marks=TWO_GPUS),
        pytest.param(bit_on_the_wire, None, id="bit on the wire", marks=pytest.mark.slow),
        pytest.param(bit_in_the_weights, 4, id="bit in the weights", marks=pytest.mark.slow),
        pytest.param(plans.bit_in_the_newest_checkpoint, 0, id="bit in a checkpoint"),
        pytest.param(data_cut_short, 2, id="data file cut short", marks=pytest.mark.slow),
    ],
)
def test_it_is_noticed_by_all_who_live_and_nothing_is_lost(laboratory, tmp_path, draw, lost):
    kind = Kind(1, draw, own_corpus=draw is data_cut_short)
    _, outcome = laboratory.try_fault(kind, random.Random(0), Setting(), tmp_path / "run")
    assert outcome.fired and outcome.problems == [], outcome
    assert outcome.recovered and outcome.noticed in (True, None) and not outcome.lost_checkpoints
    assert outcome.lost_steps <= SAVED_EVERY if lost is None else outcome.lost_steps == lost
