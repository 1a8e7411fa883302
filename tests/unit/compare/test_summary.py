"""The numbers of a comparison, against ones worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron01.compare.grouping import Section, sections
from megatron01.compare.runs import read_run
from megatron01.compare.summary import summarize, table
from megatron01.errors import UserError
from tests.unit.compare.folders import line, lines, write_family, write_run


def family(root: Path) -> Section:
    (section,) = sections([read_run(folder) for folder in write_family(root)])
    return section


def test_gap_speed_up_and_volume(tmp_path: Path) -> None:
    summary = summarize(family(tmp_path).groups)
    adam, one_bit, zero, every = summary.rows
    assert summary.baseline == 0 and summary.target_kind == "held-out"
    assert one_bit.gap == pytest.approx(0.29) and zero.gap == pytest.approx(0.09) and adam.gap is None
    assert adam.held_out_loss.spread == pytest.approx(0.02 / 2**0.5)
    # the loss that all reach is where the worst ends
    assert summary.target == pytest.approx(one_bit.held_out_loss.mean) and one_bit.steps_to_target == pytest.approx(100)
    assert one_bit.seconds_to_target == pytest.approx(50) and one_bit.bytes_to_target == pytest.approx(100_000)
    assert adam.seconds_to_target is not None and adam.seconds_to_target == pytest.approx(adam.steps_to_target * 0.5)
    assert one_bit.speed_up == pytest.approx(adam.seconds_to_target / 50)
    # 0/1 Adam takes more steps to it, of which each takes less time
    assert zero.steps_to_target > adam.steps_to_target and zero.speed_up > every.speed_up > 1
    assert [(reference.name, reference.bits, reference.is_measured) for reference in summary.references] == [
        ("Adam", 48, True),
        ("1-bit Adam", 8, True),
    ]
    header, *rows = table(summary)
    assert [row[header.index("volume vs Adam")] for row in rows] == ["1.000", "0.167", "0.042", "0.042"]
    assert [row[header.index("volume vs 1-bit Adam")] for row in rows] == ["6.000", "1.000", "0.250", "0.250"]
    assert rows[0][header.index("gap")] == "baseline" and "compute" not in header


def test_references_are_computed_where_they_were_not_run(tmp_path: Path) -> None:
    zero = write_run(tmp_path / "zero", lines(optimizer="zero_one_adam"), optimizer__optimizer="zero_one_adam")
    (section,) = sections([read_run(zero)])
    adam, one_bit = summarize(section.groups, freeze_step=20).references
    assert (adam.bits, adam.is_measured) == (48, False)  # 2 x 3/4 x 32
    assert one_bit.bits == pytest.approx(0.2 * 48 + 0.8 * 1.5 * (1 + 16 / 1024))
    assert [reference.name for reference in summarize(section.groups).references] == ["Adam"]


def test_another_baseline_and_target(tmp_path: Path) -> None:
    groups = family(tmp_path).groups
    assert summarize(groups, baseline="0/1 adam").baseline == 2
    assert summarize(groups, baseline="0/1 Adam, no").baseline == 3
    with pytest.raises(UserError, match="expected one of: Adam; 1-bit Adam"):
        summarize(groups, baseline="sgd")
    unreached = summarize(groups, target=0.5)
    assert all(row.seconds_to_target is None and row.speed_up is None for row in unreached.rows)
    assert "not reached" in table(unreached)[1]


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
    header, _, bad = table(summary)
    assert bad[header.index("train loss")] == bad[header.index("held-out loss")] == "diverged"
    assert summary.rows[1].gap is None
    # what it reached before does not count, neither for itself nor as the loss that all reach
    assert summary.target == summary.rows[0].held_out_loss.mean


def test_training_losses_where_a_run_was_not_evaluated(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "a", lines()),
        write_run(tmp_path / "b", [line(5), line(100)], optimizer__optimizer="sgdm"),
    ]
    (section,) = sections([read_run(folder) for folder in folders])
    summary = summarize(section.groups)
    assert summary.target_kind == "training" and summary.rows[1].gap == pytest.approx(0.0, abs=0.1)


def test_losses_that_were_never_measured(tmp_path: Path) -> None:
    (section,) = sections([read_run(write_run(tmp_path / "run", [{"iteration": 1, "consumed_samples": 8}]))])
    summary = summarize(section.groups)
    assert summary.target is None and summary.rows[0].tokens_per_second is None


def test_the_share_of_own_work(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [line(step, local_compute_seconds=0.5) for step in (5, 10)])
    (section,) = sections([read_run(run)])
    assert summarize(section.groups).rows[0].compute_share == pytest.approx(3 * 0.5 / 2.5)
