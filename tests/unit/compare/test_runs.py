"""Reading run folders, damaged ones included."""

from __future__ import annotations

import json
import time
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.compare import runs
from megatron01.compare.runs import parse_line, read_lines, read_run
from megatron01.errors import UserError
from tests.unit.compare.folders import PARAMETERS, line, lines, write_run


def test_a_run_tells_its_totals(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", lines()))
    assert run.notes == () and run.last_iteration == 100
    assert run.tokens[-1] == 100 * 8 * 32 and run.seconds[-1] == pytest.approx(50)
    assert run.bytes_sent[-1] == 48 * PARAMETERS * 100 / 8 and run.rounds[-1] == 100
    assert run.batch_size == 8 and run.replicas == 4


def test_processes_that_share_a_replica_count_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines(), world_size=8, distributed__tensor_model_parallel_size=4)
    assert read_run(folder).replicas == 2


def test_totals_are_summed_where_lines_do_not_tell_them(tmp_path: Path) -> None:
    old = [{key: value for key, value in entry.items() if not key.endswith("_total")} for entry in lines()]
    run = read_run(write_run(tmp_path / "run", old))
    assert run.bytes_sent[-1] == 48 * PARAMETERS * 100 / 8 and run.rounds[-1] == 100


def test_totals_stand_where_a_line_is_an_evaluation_alone(tmp_path: Path) -> None:
    run = read_run(
        write_run(tmp_path / "run", [*lines(), {"iteration": 101, "consumed_samples": 808, "eval_loss": 2.0}])
    )
    assert run.bytes_sent[-1] == run.bytes_sent[-2] > 0


def test_a_slow_first_interval_counts_as_those_after_it(tmp_path: Path) -> None:
    content = lines()
    content[0]["step_seconds"] = 6.5
    run = read_run(write_run(tmp_path / "run", content))
    assert [(one.line, one.usual) for one in run.warm_ups] == [(0, 0.5)]
    assert run.seconds[0] == pytest.approx(2.5) and run.seconds[-1] == pytest.approx(50)
    assert run.recorded_seconds[-1] == pytest.approx(80)
    assert np.isnan(run.steady("tokens_per_second")[0]) and np.isfinite(run.steady("tokens_per_second")[1:]).all()
    told = [one | {"training_seconds": 30.0 + one["iteration"] / 2} for one in content]
    assert read_run(write_run(tmp_path / "told", told)).seconds[-1] == pytest.approx(50)


@pytest.mark.parametrize(
    ("first", "rounds", "sent"),
    [(0.9, 5, 1), (6.5, 5, 20), (6.5, 100, 1)],  # hardly slower; much more was sent; many more exchanges
)
def test_what_is_slow_for_another_reason_is_no_warm_up(tmp_path: Path, first: float, rounds: int, sent: int) -> None:
    content = [{key: value for key, value in one.items() if not key.endswith("_total")} for one in lines()]
    content[0] |= {"step_seconds": first, "comm_rounds": rounds}
    content[0]["comm_bytes"] *= sent
    run = read_run(write_run(tmp_path / "run", content))
    assert not run.warm_ups and run.seconds[-1] == pytest.approx(5 * first + 47.5)
    assert read_run(write_run(tmp_path / "short", content[:2])).warm_ups == ()


def test_a_slow_first_interval_after_a_restart_counts_as_those_after_it(tmp_path: Path) -> None:
    content = lines()
    content[0]["step_seconds"] = content[8]["step_seconds"] = content[12]["step_seconds"] = 6.5
    content[8]["lost_steps"] = 3  # the others are a start, and a step that was slow for another reason
    run = read_run(write_run(tmp_path / "run", content))
    assert [one.line for one in run.warm_ups] == [0, 8]
    assert run.recorded_seconds[-1] == pytest.approx(50 + 3 * 30) and run.seconds[-1] == pytest.approx(50 + 30)
    assert np.isnan(run.steady("tokens_per_second")).sum() == 2
    assert read_run(write_run(tmp_path / "late", content[:10])).warm_ups == run.warm_ups[:1]  # too soon to tell


@pytest.mark.parametrize("begun_elsewhere", [False, True])
def test_intervals_without_traffic_do_not_explain_a_warm_up(tmp_path: Path, begun_elsewhere: bool) -> None:
    """Nor does what was sent in another folder before."""
    content = lines()
    for number, one in enumerate(content):
        one["comm_bytes"], one["comm_rounds"] = (3000, 1) if number % 4 == 0 else (0, 0)
        one["comm_bytes_total"], one["comm_rounds_total"] = 3000 * (1 + number // 4), 1 + number // 4
    content[0]["step_seconds"] = 30.0
    if begun_elsewhere:
        for one in content:
            one["iteration"] += 1000
            one["comm_bytes_total"] += 10**6
            one["comm_rounds_total"] += 400
            one["training_seconds"] = 150 + 0.5 * (one["iteration"] - 1005)
    run = read_run(write_run(tmp_path / "run", content))
    assert [(one.line, one.usual) for one in run.warm_ups] == [(0, 0.5)] and run.seconds[-1] == pytest.approx(50)
    for one in content:  # a slow network, that a few intervals wait for, the first among them
        one["step_seconds"] = 5.0 if one["comm_bytes"] else 0.1
    assert read_run(write_run(tmp_path / "slow", content)).warm_ups == ()


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    text = "".join(json.dumps(line(step)) + "\n" for step in (1, 2)) + '{"iteration": 3, "lo'
    run = read_run(write_run(tmp_path / "run", text))
    assert run.last_iteration == 2 and run.notes == ("the last line is cut off and left out",)


def test_a_whole_last_line_without_its_end_counts(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", json.dumps(line(1))))
    assert run.last_iteration == 1 and run.notes == ()


def test_lines_that_are_none_are_counted(tmp_path: Path) -> None:
    text = "nonsense\n" + json.dumps(line(1)) + "\n[]\n" + "[" * 100_000 + "\n" + json.dumps(line(2)) + "\n"
    text += json.dumps(line(1 << 52)) + "\n"
    run = read_run(write_run(tmp_path / "run", text))
    assert run.last_iteration == 2
    assert run.notes == ("4 of 6 lines are no lines of metrics and left out (line 1, 3, 4, 6)",)


def test_of_steps_done_again_the_last_time_counts(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [line(5), line(10, loss=9.0), line(15), line(10, loss=3.0), line(20)]))
    assert run.iterations.tolist() == [5, 10, 20] and run.column("loss")[1] == 3.0
    assert run.notes == ("the run goes back 1 time(s); of steps done again, the last time counts",)


@pytest.mark.parametrize(
    ("losses", "note"),
    [
        ([2.0, None, 2.0], "the loss is not a finite number in 1 line(s), first at iteration 2"),
        ([2.0, None, None], "diverged: the loss is not a finite number from iteration 2 on"),
    ],
)
def test_losses_that_are_not_finite_are_named(tmp_path: Path, losses: list[Any], note: str) -> None:
    run = read_run(write_run(tmp_path / "run", [line(step, loss=loss) for step, loss in enumerate(losses, start=1)]))
    assert run.notes == (note,) and np.isnan(run.column("loss")[1])
    assert run.diverged_at == (2 if losses[-1] is None else None)


def test_a_loss_that_ends_far_above_where_it_began(tmp_path: Path) -> None:
    content = [line(step, loss=loss) for step, loss in enumerate((8.0, 9.0, 6.0, 12.0, None, 10.0), start=1)]
    run = read_run(write_run(tmp_path / "run", content))
    assert run.diverged_at == 4
    assert run.notes == ("diverged: from iteration 4 on the loss is far above 8, where it began",)
    little = [line(step, loss=loss) for step, loss in enumerate((8.0, 9.0, 6.0, 8.5), start=1)]
    assert read_run(write_run(tmp_path / "little", little)).diverged_at is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "it is a file"),
        (lambda path: path.mkdir(), "holds no metrics.jsonl"),
        (lambda path: write_run(path, ""), "holds no line of metrics"),
        (lambda path: write_run(path, ""), "; the run has not come to its first one"),
        (lambda path: write_run(path, '{"iteration": 1'), "holds no line of metrics; the last line is cut off"),
        (lambda path: write_run(path, "a\nb\n"), "holds no line of metrics; 2 of 2 lines are no lines of metrics"),
        (lambda path: (path.mkdir(), (path / "metrics.jsonl").symlink_to("/dev/zero")), "not a regular file"),
        (lambda path: (path / "metrics.jsonl").mkdir(parents=True), "not a regular file"),
    ],
)
def test_a_folder_that_is_none_of_a_run(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "run")
    with pytest.raises(UserError, match=message):
        read_run(tmp_path / "run")


def test_a_folder_that_cannot_be_looked_at(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run folder: File name too long"):
        read_run(tmp_path / ("a" * 300))


def test_a_run_that_was_begun_in_another_folder(tmp_path: Path) -> None:
    whole = [one | {"training_seconds": one["iteration"] / 2} for one in lines()]
    late = [one | {"training_seconds": one["training_seconds"] - 20} for one in whole if one["iteration"] > 40]
    found = [read_run(write_run(tmp_path / str(number), content)) for number, content in enumerate((whole, late))]
    assert [run.untimed_steps for run in found] == [0, 40]
    assert found[1].steps.tolist() == [5.0] * 12 and found[1].seconds[-1] == pytest.approx(30)
    resumed = [late[0] | {"lost_steps": 40, "training_seconds": 1.0}, *late[1:]]
    assert read_run(write_run(tmp_path / "resumed", resumed)).untimed_steps == 0


def test_a_file_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    class Counted(FileIO):
        def read(self, size: int | None = -1) -> bytes:
            nonlocal reads
            reads += 1
            return super().read(size)

        def readinto(self, buffer: Any) -> int:
            nonlocal reads
            reads += 1
            return super().readinto(buffer)

    monkeypatch.setattr(runs, "open_regular", Counted)
    assert read_run(write_run(tmp_path / "run", lines())).last_iteration == 100
    assert reads < 10


def test_a_run_of_many_lines_takes_no_quadratic_time(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [{"iteration": number, "loss": 1.0} for number in range(30_000)])
    began = time.process_time()
    assert read_run(folder).last_iteration == 29_999
    assert time.process_time() - began < 5


def test_links_to_a_run_and_to_its_files_are_followed(tmp_path: Path) -> None:
    real = write_run(tmp_path / "real", lines())
    (tmp_path / "folder").symlink_to(real, target_is_directory=True)
    (tmp_path / "files").mkdir()
    for path in real.iterdir():
        (tmp_path / "files" / path.name).symlink_to(path)
    for name in ("folder", "files"):
        run = read_run(tmp_path / name)
        assert (run.last_iteration, run.replicas, run.notes) == (100, 4, ())


def test_a_run_without_its_other_files_is_still_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines())
    (folder / "config.yaml").write_text("a: &a [1]\nb: *a\n")
    (folder / "environment.json").unlink()
    run = read_run(folder)
    assert run.replicas is None and run.optimizer == "unknown" and "settings are not known" in run.notes[0]


def test_hostile_settings_do_not_matter(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines(), data__seq_length="inf", optimizer__block_size="-3")
    (folder / "environment.json").write_text('{"world_size": "many"}')
    run = read_run(folder)
    assert run.replicas is None and run.block_size == 1024 and np.isnan(run.tokens).all()
    shares = {"optimizer__block_size": 0.5, "distributed__tensor_model_parallel_size": 0.5}
    run = read_run(write_run(tmp_path / "shares", lines(), **shares))
    assert run.replicas == 4 and run.block_size == 1
    run = read_run(write_run(tmp_path / "large", lines(), world_size=10**30, optimizer__block_size="1e300"))
    assert run.replicas is None and run.block_size == 1024


def test_text_of_a_run_steers_no_terminal(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a\x1b[31mb", lines(), optimizer__optimizer="x\u202ey"))
    assert run.name == "a [31mb" and run.optimizer == "x y"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(
    st.lists(
        st.binary(max_size=30)
        | st.dictionaries(
            st.sampled_from(["iteration", "consumed_samples", "loss", "eval_loss", "lr"]), JSON, max_size=5
        ).map(lambda values: json.dumps(values).encode()),
        max_size=8,
    )
)
def test_no_line_breaks_the_reader(content: list[bytes]) -> None:
    read, _ = read_lines([text + b"\n" for text in content])
    iterations = [entry["iteration"] for entry in read]
    assert iterations == sorted(set(iterations))


def test_what_is_no_line_of_metrics() -> None:
    for text in (b"", b"1", b"{}", b'{"iteration": -1}', b'{"iteration": 1.5}', b'{"iteration": true}', b"\xff"):
        assert parse_line(text) is None
    assert parse_line(b'{"iteration": 1' + b" " * (1 << 20) + b"}") is None
