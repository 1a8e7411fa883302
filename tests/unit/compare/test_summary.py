"""The numbers of a comparison, against ones computed by hand."""

from __future__ import annotations

from math import isfinite, isnan
from pathlib import Path
from typing import Any

import pytest

from megatron01.compare.conclusions import answers, caption_of, table
from megatron01.compare.grouping import Section, sections
from megatron01.compare.runs import read_run
from megatron01.compare.summary import Estimate, Summary, summarize
from megatron01.errors import UserError
from tests.unit.compare.folders import line, lines, write_family, write_run


def family(root: Path) -> Section:
    (section,) = sections([read_run(folder) for folder in write_family(root)])
    return section


def by_name(summary: Summary) -> dict[str, list[str]]:
    """Quantity -> its cells, one per group."""
    return {name: cells for name, *cells in table(summary)}


def test_gap_speed_up_and_volume(tmp_path: Path) -> None:
    summary = summarize(family(tmp_path).groups)
    adam, one_bit, zero, every = summary.rows
    assert summary.baseline == 0 and summary.target_kind == "held-out"
    assert one_bit.gap.value == pytest.approx(0.29) and zero.gap.value == pytest.approx(0.09) and isnan(adam.gap.value)
    assert adam.held_out_loss.spread == pytest.approx(0.02 / 2**0.5)
    # the target, which all groups reach, is the final loss of the worst
    assert summary.target == pytest.approx(one_bit.held_out_loss.mean) and one_bit.reach.step == pytest.approx(100)
    assert one_bit.reach.seconds == pytest.approx(50) and one_bit.reach.bytes_sent == pytest.approx(100_000)
    assert adam.reach.seconds == pytest.approx(adam.reach.step * 0.5)
    assert one_bit.speed_up == pytest.approx(adam.reach.seconds / 50)
    # 0/1 Adam needs more steps to the target, but less time per step
    assert zero.reach.step > adam.reach.step and zero.speed_up > every.speed_up > 1
    assert [(reference.name, reference.bits, reference.is_measured) for reference in summary.references] == [
        ("Adam", 48, True),
        ("1-bit Adam", 8, True),
    ]
    cells = by_name(summary)
    assert cells["volume vs Adam"] == ["1.000", "0.167", "0.042", "0.042"]
    assert cells["volume vs 1-bit Adam"] == ["6.000", "1.000", "0.250", "0.250"]
    # standard error of the difference; the single run is taken to spread like Adam's two: 0.0141 x sqrt(1 + 1/2)
    assert cells["gap"][:2] == ["baseline", "+0.2900 ± 0.0173"] and "compute" not in cells


def test_references_are_computed_where_they_were_not_run(tmp_path: Path) -> None:
    zero = write_run(tmp_path / "zero", lines(optimizer="zero_one_adam"), optimizer__optimizer="zero_one_adam")
    (section,) = sections([read_run(zero)])
    adam, one_bit = summarize(section.groups, freeze_step=20).references
    assert (adam.bits, adam.is_measured) == (48, False)  # 2 x 3/4 x 32
    assert one_bit.bits == pytest.approx(0.2 * 48 + 0.8 * 1.5 * (1 + 16 / 1024))
    assert [reference.name for reference in summarize(section.groups).references] == ["Adam"]


@pytest.mark.parametrize("other", [{"world_size": 8}, {"training__precision": "bf16"}])
def test_no_reference_is_computed_for_runs_that_would_send_different_amounts(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    zero = lines(optimizer="zero_one_adam")
    folders = [
        write_run(tmp_path / "one", zero, optimizer__optimizer="zero_one_adam"),
        write_run(tmp_path / "other", zero, optimizer__optimizer="zero_one_adam", **other),
    ]
    (section,) = sections([read_run(folder) for folder in folders])
    assert summarize(section.groups, freeze_step=20).references == ()


def test_another_baseline_and_target(tmp_path: Path) -> None:
    groups = family(tmp_path).groups
    assert summarize(groups, baseline="0/1 adam").baseline == 2
    assert summarize(groups, baseline="0/1 Adam, no").baseline == 3
    assert summarize(groups[::-1], baseline="0/1 adam").baseline == 1  # before the label that only begins so
    with pytest.raises(UserError, match="expected one of: Adam; 1-bit Adam"):
        summarize(groups, baseline="sgd")
    unreached = summarize(groups, target=0.5)
    assert all(isnan(row.reach.seconds) and isnan(row.speed_up) for row in unreached.rows)
    assert set(by_name(unreached)["steps to loss"]) == {"not reached"}
    assert caption_of(unreached).endswith("Steps to loss are to a held-out loss of 0.5000.")


def test_every_seed_reaches_the_target(tmp_path: Path) -> None:
    for seed, worse in enumerate((0.0, 0.4)):
        write_run(tmp_path / f"a{seed}", lines(worse=worse), training__seed=seed)
    write_run(tmp_path / "b", lines(worse=0.3), optimizer__optimizer="sgdm")
    (section,) = sections([read_run(tmp_path / name) for name in ("a0", "a1", "b")])
    summary = summarize(section.groups)
    assert summary.target == pytest.approx(lines(worse=0.4)[-1]["eval_loss"])
    assert all(row.reach.step > 0 and row.reach.by_all for row in summary.rows)
    (seeds, _) = (row.reach for row in summarize(section.groups, target=2.7).rows)
    assert seeds.step > 0 and not seeds.by_all


def test_a_run_that_diverged_has_no_loss(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "adam", lines()),
        write_run(
            tmp_path / "bad",
            [line(5, eval_loss=1.0), line(10, loss=None, eval_loss=None), line(15, loss=None)],
            optimizer__optimizer="sgdm",
        ),
    ]
    (section,) = sections([read_run(folder) for folder in folders])
    summary = summarize(section.groups)
    cells = by_name(summary)
    assert cells["train loss"][1] == cells["held-out loss"][1] == "diverged"
    assert isnan(summary.rows[1].gap.value) and isnan(summary.rows[1].reach.step)
    # its earlier losses count neither for itself nor for the common target
    assert summary.target == summary.rows[0].held_out_loss.mean


def test_training_losses_where_a_run_was_not_evaluated(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a", lines()),
        write_run(tmp_path / "b", [line(5), line(100)], optimizer__optimizer="sgdm"),
    ]
    (section,) = sections([read_run(folder) for folder in folders])
    summary = summarize(section.groups)
    assert summary.target_kind == summary.final_kind == "training"
    assert summary.rows[1].gap.value == pytest.approx(0.0, abs=0.1)


def test_which_losses_make_the_target(tmp_path: Path) -> None:
    once = [{key: value for key, value in one.items() if key != "eval_loss"} for one in lines()[:-1]] + lines()[-1:]
    nothing = [{"iteration": 100, "consumed_samples": 800}]
    runs = [
        read_run(write_run(tmp_path / name, content, optimizer__optimizer=name))
        for name, content in (("adam", lines()), ("sgdm", nothing), ("bin_sgdm", once))
    ]
    kinds = [summarize(sections(runs[:count])[0].groups).target_kind for count in (1, 2, 3)]
    assert kinds == ["held-out", "held-out", "training"]  # a run without losses is ignored; one evaluation is no curve


def test_rates_are_of_each_run_by_itself(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(steps), lines(steps=steps), training__seed=steps) for steps in (60, 100)]
    (row,) = summarize(sections([read_run(folder) for folder in folders])[0].groups).rows
    assert row.rounds_per_step == pytest.approx(1) and row.bytes_per_step == pytest.approx(6000)


def test_what_left_the_nodes_is_told_where_it_is_a_part(tmp_path: Path) -> None:
    parts = {"adam": 0.25, "sgdm": 1.0, "bin_sgdm": 0.0}
    folders = [
        write_run(
            tmp_path / name,
            [one | {"comm_bytes_between_nodes": part * one["comm_bytes"]} for one in lines()],
            optimizer__optimizer=name,
        )
        for name, part in parts.items()
    ]
    (section,) = sections([read_run(folder) for folder in folders])
    cells = by_name(summarize(section.groups))
    assert cells["sent"] == ["600 kB"] * 3 and cells["between nodes"] == ["150 kB", "", ""]


def test_times_count_from_where_they_are_on_record(tmp_path: Path) -> None:
    whole = [one | {"training_seconds": one["iteration"] / 2} for one in lines()]
    late = [one | {"training_seconds": one["training_seconds"] - 20} for one in whole if one["iteration"] > 40]
    folders = [
        write_run(tmp_path / str(number), one, training__seed=number) for number, one in enumerate((whole, late))
    ]
    for folder in folders:
        (row,) = summarize(sections([read_run(folder)])[0].groups).rows
        assert row.tokens_per_second == pytest.approx(8 * 32 / 0.5)
    summary = summarize(sections([read_run(folder) for folder in folders])[0].groups)
    assert summary.different_conditions == ("shares of timed steps",)
    # of seeds that reach the target at the same step, one has no time to it
    (row,) = summary.rows
    assert isfinite(row.reach.step) and isnan(row.reach.seconds)


def test_losses_that_were_never_measured(tmp_path: Path) -> None:
    (section,) = sections([read_run(write_run(tmp_path / "run", [{"iteration": 1, "consumed_samples": 8}]))])
    summary = summarize(section.groups)
    assert isnan(summary.target) and isnan(summary.rows[0].tokens_per_second)


def test_the_share_of_own_work(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [line(step, local_compute_seconds=0.5) for step in (5, 10)])
    (section,) = sections([read_run(run)])
    assert summarize(section.groups).rows[0].compute_share == pytest.approx(3 * 0.5 / 2.5)


@pytest.mark.parametrize(
    ("one", "other", "error", "p"),
    [  # from scipy.stats.ttest_ind(equal_var=False); the third is a t-test of one new value against a sample
        ([6.0, 6.2, 6.1], [6.3, 6.5, 6.7], 0.1290994, 0.0547868),
        ([1.0, 2.0], [1.5, 2.5, 9.0, 4.0], 1.7380545, 0.1991844),
        ([7.0], [1.0, 2.0, 3.0], 1.1547005, 0.0494136),
    ],
)
def test_a_difference_and_what_the_seeds_say_of_it(
    one: list[float], other: list[float], error: float, p: float
) -> None:
    found = Estimate.of(one).above(Estimate.of(other))
    assert found.error == pytest.approx(error, rel=1e-5) and found.p == pytest.approx(p, rel=1e-4)
    assert Estimate.of(other).above(Estimate.of(one)).p == pytest.approx(p, rel=1e-4)


def test_runs_with_the_same_seeds_are_compared_in_pairs() -> None:
    one = Estimate.of([6.30, 6.52, 6.71], seeds=["0", "1", "2"])
    other = Estimate.of([6.61, 6.19, 6.40], seeds=["2", "0", "1"])
    found = one.above(other)
    # from scipy.stats.ttest_rel, of the values in the order of the seeds
    assert (found.value, found.error) == (pytest.approx(0.11), pytest.approx(0.0057735, rel=1e-4))
    assert found.p == pytest.approx(0.0027435, rel=1e-3)
    elsewhere = Estimate.of([6.61, 6.19, 6.40], seeds=["2", "0", "3"])
    assert one.above(elsewhere).p > 0.3 and one.above(Estimate.of([6.61, 6.19, 6.40])).p > 0.3
    assert Estimate.of([1.0, 2.0], seeds=["0", ""]).by_seed == {}


def test_runs_with_one_seed_show_no_spread(tmp_path: Path) -> None:
    found = Estimate.of([1.0, 2.0, 3.5], seeds=["0", "0", "1"])
    assert (found.mean, found.count, found.by_seed) == (2.5, 2, {"0": 1.5, "1": 3.5})
    for name, optimizer, worse in (("a", "adam", 0.0), ("b", "adam", 0.0), ("c", "sgdm", 0.1), ("d", "sgdm", 0.1)):
        write_run(tmp_path / name, lines(worse=worse), optimizer__optimizer=optimizer, training__seed=3)
    (section,) = sections([read_run(tmp_path / name) for name in "abcd"])
    summary = summarize(section.groups)
    assert by_name(summary)["seeds"] == ["1 (2 runs)"] * 2 and by_name(summary)["gap"][1] == "+0.1000"
    assert "One seed each: the spread over seeds is not known." in answers(summary)


def test_tokens_are_not_counted_without_settings(tmp_path: Path) -> None:
    (write_run(tmp_path / "a", lines()) / "config.yaml").unlink()
    summary = summarize(sections([read_run(tmp_path / "a")])[0].groups)
    assert isnan(summary.rows[0].tokens_per_second) and "tokens/s" not in by_name(summary)


def test_differences_without_a_spread() -> None:
    assert str(Estimate.of([1.0]).above(Estimate.of([2.0])).p) == "nan"
    same, other = Estimate.of([1.0, 1.0]), Estimate.of([2.0, 2.0])
    assert (same.above(same).p, other.above(same).p) == (pytest.approx(1.0), 0.0)


def test_final_losses_are_compared_at_the_same_step_alone(tmp_path: Path) -> None:
    later = [*lines(optimizer="zero_one_adam"), line(110)]  # trained on since its last evaluation
    folders = [
        write_run(tmp_path / "a", lines()),
        write_run(tmp_path / "b", later, optimizer__optimizer="zero_one_adam"),
        write_run(tmp_path / "c", lines(steps=60), optimizer__optimizer="sgdm"),
    ]
    groups = sections([read_run(folder) for folder in folders])[0].groups
    assert summarize(groups[:2]).final_kind == "held-out"
    assert summarize(groups).final_kind == "" and all(isnan(row.gap.value) for row in summarize(groups).rows)


def test_a_run_of_full_gradients_alone_is_no_reference_for_exchanges_of_bits(tmp_path: Path) -> None:
    content = [one | {"sync_kind": "full"} for one in lines(optimizer="one_bit_adam")]
    folders = [
        write_run(tmp_path / "a", lines()),
        write_run(tmp_path / "b", content, optimizer__optimizer="one_bit_adam"),
    ]
    summary = summarize(sections([read_run(folder) for folder in folders])[0].groups)
    assert [reference.name for reference in summary.references] == ["Adam"]


def test_a_warm_up_is_in_no_speed(tmp_path: Path) -> None:
    content = lines()
    for one in content:
        one |= {"mfu": 0.4, "local_compute_seconds": 0.5}
    content[0] |= {"step_seconds": 30.0, "mfu": 0.01, "local_compute_seconds": 0.0}
    (section,) = sections([read_run(write_run(tmp_path / "run", content))])
    (row,) = summarize(section.groups).rows
    assert row.tokens_per_second == pytest.approx(8 * 32 / 0.5) and row.mfu == pytest.approx(0.4)
    assert row.compute_share == pytest.approx(3 * 0.5 / 2.5)
    assert row.reach.seconds == pytest.approx(50) and section.groups[0].marks == ("warm-up left out of times",)
