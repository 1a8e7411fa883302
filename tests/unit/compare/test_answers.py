"""The sentences of a comparison: correct if the runs allow a conclusion, absent if not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron01.compare.conclusions import answers, table
from megatron01.compare.grouping import sections
from megatron01.compare.runs import read_run
from megatron01.compare.summary import summarize
from tests.unit.compare.folders import line, lines, write_run

Lines = list[dict[str, Any]]


class Family:
    """Run folders, added one by one, and the sentences about them."""

    def __init__(self, root: Path) -> None:
        self.folders: list[Path] = []
        self._root = root

    def add(
        self, optimizer: str, content: Lines | None = None, *, seed: int = 0, worse: float = 0.0, **more: Any
    ) -> None:
        seconds = more.pop("seconds", 0.5)
        made = lines(optimizer=optimizer, worse=worse, seconds=seconds) if content is None else content
        folder = self._root / f"{optimizer}-{len(self.folders)}"
        settings = {"optimizer__optimizer": optimizer, "training__seed": seed}
        self.folders.append(write_run(folder, made, **(settings | more)))

    def seeds(
        self,
        optimizer: str,
        *,
        spread: float = 0.01,
        worse: float = 0.0,
        seconds: float = 0.5,
        first: int | None = None,
    ) -> None:
        """Three runs, with seeds that no other group has unless ``first`` is given."""
        first = len(self.folders) if first is None else first
        for number in range(3):
            more = spread * number
            self.add(optimizer, seed=first + number, worse=worse + more, seconds=seconds * (1 + more))

    def say(self, **options: Any) -> str:
        (section,) = sections([read_run(folder) for folder in self.folders])
        return " ".join(answers(summarize(section.groups, **options)))


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family(tmp_path)


def test_one_run_each(family: Family) -> None:
    family.add("adam")
    family.add("one_bit_adam", worse=0.3)
    family.add("zero_one_adam", worse=0.1, seconds=0.2)
    assert family.say() == (
        "0/1 Adam reached a held-out loss of 2.6140 first, after 16.1 s; Adam took 2.3 times as long and 1-bit Adam "
        "3.1. "
        "Adam ended lowest, at a held-out loss of 2.3140; 0/1 Adam ended 0.1000 higher and 1-bit Adam 0.3000. "
        "0/1 Adam sent least, 2 bits per parameter and step; 1-bit Adam sent 4.0 times as much and Adam 24. "
        "One run each: the spread over seeds is not known. 0/1 Adam never froze the second moment."
    )


def test_seeds_that_tell_it(family: Family) -> None:
    family.seeds("adam")
    family.seeds("zero_one_adam", worse=0.2, seconds=0.1)
    said = family.say()
    assert "0/1 Adam reached a held-out loss of 2.5340 first" in said
    assert "Adam ended lowest, at a held-out loss of 2.3240; 0/1 Adam ended 0.2000 ± 0.0082 higher; ± is the" in said
    assert "not significantly" not in said


def test_seeds_that_do_not_tell_it(family: Family) -> None:
    family.seeds("adam", spread=0.1)
    family.seeds("sgdm", spread=0.1, worse=0.05)
    said = family.say()
    assert "Adam reached a held-out loss of 2.5640 after " in said and "first" not in said
    assert "; not significantly later: SGD with momentum after " in said and "lowest" not in said
    assert (
        "Adam ended at a held-out loss of 2.4140; not significantly higher: SGD with momentum by 0.0500 ± 0.0816; ± is "
        "the standard error." in said
    )
    assert "; not every seed of Adam reached it." in family.say(target=2.47)
    assert family.say(target=1.0).startswith("None of the runs reached a held-out loss of 1.0000 (mean over seeds).")


def test_nothing_is_later_than_what_not_every_seed_reaches(family: Family) -> None:
    family.seeds("adam", spread=0.1)
    family.seeds("sgdm", seconds=5.0)
    said = family.say(target=2.47)
    assert "first" not in said and "; not significantly later: SGD with momentum after " in said
    assert "SGD with momentum took " in family.say(target=2.6)


def test_the_same_seeds_are_compared_in_pairs(family: Family) -> None:
    family.seeds("adam", spread=0.1, first=0)
    family.seeds("sgdm", spread=0.11, worse=0.05, first=0)  # less than the spread of seeds, above Adam with each seed
    said = family.say()
    assert "Adam ended lowest" in said and "ended 0.0600 ± 0.0058 higher; ± is the standard error" in said


def test_some_can_be_told_from_the_lowest_and_some_cannot(family: Family) -> None:
    family.seeds("adam")
    family.seeds("sgdm", worse=0.01)
    family.seeds("one_bit_adam", worse=1.0, seconds=2.0)
    said = family.say()
    assert "1-bit Adam took" in said and "; not significantly later: SGD with momentum after " in said
    assert "1-bit Adam ended 1.0000 ± 0.0082 higher; not significantly higher: SGD with momentum by 0.0100" in said


def test_more_comparisons_ask_for_more_evidence(family: Family) -> None:
    family.seeds("adam")
    family.seeds("sgdm", worse=0.03)  # p = 0.02
    assert "Adam ended lowest" in family.say()
    for optimizer in ("one_bit_adam", "zero_one_adam", "bin_sgdm"):
        family.seeds(optimizer, worse=2.0)
    assert "not significantly higher: SGD with momentum by 0.0300" in family.say()


def test_a_group_of_one_run_among_seeds(family: Family) -> None:
    family.seeds("adam", spread=0.1)
    family.add("sgdm", worse=0.2)
    said = family.say()
    assert (
        "not significantly higher: SGD with momentum by 0.1" in said
        and "One run of SGD with momentum: the spread over seeds is not known there." in said
    )


def test_equal_runs_are_not_ranked(family: Family) -> None:
    family.add("adam")
    family.add("bin_sgdm", lines(optimizer="adam"))
    said = family.say()
    assert "Adam reached a held-out loss of 2.3140 after 50.0 s; not significantly later: BinSGDM after 50.0 s." in said
    assert "Adam ended at a held-out loss of 2.3140; not significantly higher: BinSGDM by 0.0000." in said
    assert "Adam and BinSGDM sent the same, 48 bits per parameter and step." in said
    family.add("sgdm", lines(optimizer="adam", seconds=0.5025))  # half a percent is no difference
    assert "took" not in family.say()


def test_one_group(family: Family) -> None:
    family.add("zero_one_adam")
    assert family.say() == (
        "0/1 Adam is the only group of runs here, so that there is nothing to compare its losses with. "
        "0/1 Adam reached a held-out loss of 2.3140 after 50.0 s. 0/1 Adam ended at a held-out loss of 2.3140. "
        "0/1 Adam sent 2 bits per parameter and step; Adam would send 24 times as much (computed). "
        "0/1 Adam never froze the second moment."
    )


def test_a_run_that_diverged_wins_nothing(family: Family) -> None:
    family.add("adam")
    family.add("sgdm", worse=0.1)
    family.add("bin_sgdm", [line(5, eval_loss=1.0, comm_bytes=1, comm_rounds=1), line(10, loss=None)])
    said = family.say()
    assert "Adam reached a held-out loss of 2.4140 first" in said and "BinSGDM diverged and is not compared." in said
    assert said.count("BinSGDM") == 1
    assert "Adam is the only group of runs that did not diverge" in family_of(family, 0, 2).say()
    assert family_of(family, 2).say() == "BinSGDM diverged: there is no loss to compare."


def family_of(family: Family, *chosen: int) -> Family:
    family.folders = [family.folders[number] for number in chosen if number < len(family.folders)] or family.folders[
        -1:
    ]
    return family


def test_a_target_that_some_reach_and_some_do_not(family: Family) -> None:
    family.add("adam")
    family.add("sgdm", worse=0.1)
    family.add("one_bit_adam", worse=0.5)
    said = family.say(target=2.5)
    assert said.startswith("Adam reached a held-out loss of 2.5000 first, after ")
    assert "1-bit Adam did not reach it in 100 steps." in said
    assert family.say(target=2.35).startswith("Adam reached a held-out loss of 2.3500 after 48.2 s;")
    assert "SGD with momentum did not reach it in 100 steps; 1-bit Adam did not" in family.say(target=2.35)
    assert family.say(target=1.0).startswith("None of the runs reached a held-out loss of 1.0000.")


def test_below_the_target_where_it_was_first_measured(family: Family) -> None:
    family.add("adam", [line(step, eval_loss=loss) for step, loss in ((50, 2.0), (100, 1.5), (150, 1.4))])
    family.add("sgdm", [line(step, eval_loss=loss) for step, loss in ((10, 3.0), (20, 2.4), (150, 1.6))])
    # Adam may have reached it long before its first evaluation; SGD with momentum reaches it at step 18
    said = family.say(target=2.5)
    assert "2.5000 after 9.2 s; not significantly later: Adam after at most 25.0 s." in said


def test_a_target_that_is_reached_at_step_0(family: Family) -> None:
    family.add("adam", [line(step, eval_loss=loss) for step, loss in ((0, 2.0), (100, 1.5))])
    family.add("sgdm", [line(step, eval_loss=loss) for step, loss in ((10, 3.0), (20, 2.4), (100, 1.6))])
    assert family.say(target=2.5).startswith("Adam reached a held-out loss of 2.5000 first, after at most 0 steps. ")


def test_steps_where_times_do_not_compare(family: Family) -> None:
    family.add("adam", training__precision="bf16")
    family.add("sgdm", worse=0.1, seconds=0.001)
    said = family.say()
    assert said.startswith(
        "Adam reached a held-out loss of 2.4140 first, after 90 steps; SGD with momentum took 1.11 times as many"
    )
    assert "Times are not compared: precisions differ." in said


def test_ends_that_do_not_compare(family: Family) -> None:
    family.add("adam")
    family.add("sgdm", lines(steps=60))
    assert "Final losses are not compared: the runs do not have one at the same step." in family.say()
    for step in (10, 20):  # of runs before their first training loss
        family.add("adam", [{"iteration": step, "consumed_samples": 8 * step, "eval_loss": 3.0}], seed=step)
    assert "Final losses are not compared: the runs" in family_of(family, 2, 3).say()


def test_what_is_not_known(family: Family) -> None:
    family.add("adam", [line(step, comm_bytes=100, comm_rounds=1) for step in range(5, 101, 5)])
    family.add("sgdm", [{"iteration": 100, "consumed_samples": 800}])
    said = family.say()
    assert "Adam ended at a training loss of 2." in said and "; no loss is known of SGD with momentum." in said
    assert "Adam sent 20 B a step; nothing sent is recorded of SGD with momentum." in said
    assert family_of(family, 1).say().endswith("No loss is known.")


def test_runs_before_their_first_training_loss_have_no_target(family: Family) -> None:
    for optimizer, loss in (("adam", 3.0), ("zero_one_adam", 3.5)):
        family.add(optimizer, [{"iteration": 10, "consumed_samples": 80, "eval_loss": loss}])
    said = family.say()
    assert said.startswith("Adam ended lowest, at a held-out loss of 3.0000; 0/1 Adam ended 0.5000 higher.")
    (section,) = sections([read_run(folder) for folder in family.folders])
    assert "steps to loss" not in [cells[0] for cells in table(summarize(section.groups))]


def test_one_replica_sends_nothing(family: Family) -> None:
    for optimizer in ("adam", "sgdm"):
        family.add(optimizer, [line(5), line(10)], world_size=1)
    assert "Nothing was sent: each run has one replica." in family.say()
    family.add("bin_sgdm", [line(5), line(10)], world_size=2)
    assert "Nothing was sent" not in family.say()


def test_a_label_with_a_comma_stays_one_name(family: Family) -> None:
    family.add("zero_one_adam")
    family.add("zero_one_adam", worse=0.1, optimizer__sync_policy="every")
    assert "0/1 Adam (no local steps) ended 0.1000 higher." in family.say()


def test_one_bit_adam_that_was_adam_all_along(family: Family) -> None:
    family.add("adam")
    family.add("one_bit_adam", [one | {"sync_kind": "full"} for one in lines(optimizer="one_bit_adam")])
    assert (
        "1-bit Adam never left the full phase and exchanged no bits, but full gradients as Adam does." in family.say()
    )
