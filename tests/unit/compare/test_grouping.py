"""How runs are grouped and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron01.compare import grouping
from megatron01.compare.grouping import NEVER_FROZE, NEVER_LEFT_FULL, sections
from megatron01.compare.runs import read_run
from tests.unit.compare.folders import line, lines, write_family, write_run


def test_seeds_make_a_group_and_settings_a_label(tmp_path: Path) -> None:
    (section,) = sections([read_run(folder) for folder in write_family(tmp_path)])
    assert [(group.label, len(group.runs)) for group in section.groups] == [
        ("Adam", 2),
        ("1-bit Adam", 1),
        ("0/1 Adam", 1),
        ("0/1 Adam, no local steps", 1),
    ]
    assert section.title == "GPT-2, 2 layers of 64, 8 sequences of 32 tokens a step" and not section.differs


def test_runs_whose_seed_is_not_known_count_as_one_seed_each(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(number), lines(), training__seed=min(number, 1)) for number in range(3)]
    for folder in folders[1:]:
        config = folder / "config.yaml"
        config.write_text(config.read_text().replace("  seed: 1\n", ""))
    (section,) = sections([read_run(folder) for folder in folders])
    (group,) = section.groups
    assert sorted(group.seeds) == ["", "", "0"] and group.num_seeds == 3


def test_other_numbers_of_replicas_are_other_groups(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(number), lines(), world_size=number) for number in (2, 4)]
    (section,) = sections([read_run(folder) for folder in folders])
    assert [group.label for group in section.groups] == ["Adam, replicas 2", "Adam, replicas 4"]


def test_many_groups_are_not_compared_pair_by_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [read_run(write_run(tmp_path / str(number), lines(), optimizer__lr=number + 1)) for number in range(20)]
    asked: list[str] = []
    compared = grouping._compared
    monkeypatch.setattr(grouping, "_compared", lambda run: asked.append(run.name) or compared(run))
    (section,) = sections(runs)
    assert [group.label for group in section.groups] == [f"Adam, lr {number + 1}" for number in range(20)]
    assert len(asked) <= 3 * len(runs)


def test_a_bert_is_one_with_any_tokenizer(tmp_path: Path) -> None:
    more = {"data__objective": "sop", "data__tokenizer_type": "SentencePieceTokenizer"}
    (section,) = sections([read_run(write_run(tmp_path / "one", lines(), **more))])
    assert section.title.startswith("BERT, 2 layers")


def test_what_cannot_be_compared_has_its_own_section(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "one", lines()),
        write_run(tmp_path / "two", lines(), training__seed=1),
        write_run(tmp_path / "deeper", lines(), model__num_layers=4),
        write_run(tmp_path / "elsewhere", lines(), data__data_path=["other"]),
        write_run(tmp_path / "bigger", [{**entry, "consumed_samples": 16 * entry["iteration"]} for entry in lines()]),
    ]
    found = sections([read_run(folder) for folder in folders])
    assert [section.differs for section in found] == [
        "",
        "num_layers 4 in place of 2",
        "data_path other in place of text",
        "batch size 16 in place of 8",
    ]


def marks(root: Path, optimizer: str, **changes: Any) -> tuple[str, ...]:
    """The marks of a run: lower-case ``changes`` go into each of its lines, those in capitals are settings."""
    settings = {key.lower(): value for key, value in changes.items() if key.isupper()}
    own = {key: value for key, value in changes.items() if not key.isupper()}
    content = [one | own for one in lines(optimizer=optimizer)]
    run = read_run(write_run(root / "run", content, optimizer__optimizer=optimizer, **settings))
    return sections([run])[0].groups[0].marks


def test_a_run_that_never_left_its_first_phase_is_marked(tmp_path: Path) -> None:
    assert marks(tmp_path, "one_bit_adam", sync_kind="full") == (NEVER_LEFT_FULL,)
    assert marks(tmp_path, "zero_one_adam", sync_kind="full") == (NEVER_LEFT_FULL,)
    assert marks(tmp_path, "one_bit_adam", sync_kind="full", compression_error=0.5) == ()
    assert marks(tmp_path, "one_bit_adam", sync_kind="one_bit") == marks(tmp_path, "one_bit_adam", sync_kind=None) == ()
    assert marks(tmp_path, "adam", sync_kind="full") == marks(tmp_path, "no.such.Optimizer", sync_kind="full") == ()


def test_a_second_moment_that_was_never_frozen_is_marked(tmp_path: Path) -> None:
    assert marks(tmp_path, "zero_one_adam") == (NEVER_FROZE,)
    assert marks(tmp_path, "zero_one_adam", sync_interval=None) == ()
    for policy, interval, expected in (("schedule", 2, ()), ("schedule:2", 2, (NEVER_FROZE,)), ("schedule:2", 4, ())):
        assert marks(tmp_path, "zero_one_adam", sync_interval=interval, OPTIMIZER__SYNC_POLICY=policy) == expected
    assert marks(tmp_path, "zero_one_adam", OPTIMIZER__VARIANCE_FREEZE_STEP=99) == ()
    assert marks(tmp_path, "zero_one_adam", sync_interval=2, OPTIMIZER__VARIANCE_FREEZE_STEP=100) == (NEVER_FROZE,)


def test_a_mark_of_some_seeds_says_of_how_many(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / str(seed), [*lines(steps=20), line(25, loss=loss)], training__seed=seed)
        for seed, loss in enumerate((1.0, None, None))
    ]
    (section,) = sections([read_run(folder) for folder in folders])
    assert section.groups[0].marks == ("diverged (2 of 3 runs)",)


@pytest.mark.parametrize("code", ["import no_such_package", "raise RuntimeError"])
def test_an_optimizer_that_cannot_be_imported_here_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    module = f"optimizer_of_{len(code)}"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    run = read_run(write_run(tmp_path / "run", lines(), optimizer__optimizer=f"{module}.Own"))
    (group,) = sections([run])[0].groups
    assert group.label == f"{module}.Own" and group.marks == ()


def test_what_changes_nothing_does_not_split(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "one", lines(), logging__run_dir="a", data__num_workers=0, model__torch_compile=True),
        write_run(tmp_path / "two", lines(), logging__run_dir="b", data__num_workers=2, model__torch_compile=False),
    ]
    (section,) = sections([read_run(folder) for folder in folders])
    assert len(section.groups) == 2  # losses of compiled and uncompiled runs are comparable, times are not


def test_a_batch_size_that_follows_from_the_replicas_is_as_one_that_is_given(tmp_path: Path) -> None:
    sizes = (None, 8)
    folders = [
        write_run(tmp_path / str(seed), lines(), training__global_batch_size=sizes[seed], training__seed=seed)
        for seed in range(2)
    ]
    (section,) = sections([read_run(folder) for folder in folders])
    assert [group.label for group in section.groups] == ["Adam"]


def test_the_learning_rate_is_named_only_where_it_must_be(tmp_path: Path) -> None:
    zero = {"optimizer__optimizer": "zero_one_adam"}
    folders = [
        write_run(tmp_path / "a", lines(), optimizer__lr=1e-3, **zero),
        write_run(tmp_path / "b", lines(), optimizer__lr=2e-3, optimizer__sync_policy="every", **zero),
    ]
    (section,) = sections([read_run(folder) for folder in folders])
    assert [group.label for group in section.groups] == ["0/1 Adam", "0/1 Adam, no local steps"]
    folders.append(write_run(tmp_path / "c", lines(), optimizer__lr=4e-3, **zero))
    (section,) = sections([read_run(folder) for folder in folders])
    assert [group.label for group in section.groups] == [
        "0/1 Adam, lr 0.001",
        "0/1 Adam, lr 0.002, no local steps",
        "0/1 Adam, lr 0.004",
    ]


@pytest.mark.parametrize(
    ("setting", "default", "other", "named"),
    [
        ("momentum_bias_correction", True, False, "momentum_bias_correction false"),
        ("variance_freeze_step", None, 50, "variance_freeze_step 50"),
        ("adam_eps", 1e-8, 1e-6, "adam_eps 1.0e-06"),
    ],
)
def test_defaults_are_not_named(tmp_path: Path, setting: str, default: object, other: object, named: str) -> None:
    for name, value in (("default", default), ("other", other)):
        write_run(tmp_path / name, lines(), optimizer__optimizer="zero_one_adam", **{f"optimizer__{setting}": value})
    (section,) = sections([read_run(tmp_path / name) for name in ("default", "other")])
    assert [group.label for group in section.groups] == ["0/1 Adam", f"0/1 Adam, {named}"]


def test_runs_without_settings_stand_alone(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, lines()) for name in ("a", "b")]
    for folder in folders:
        (folder / "config.yaml").unlink()
    known, unknown = sections([*map(read_run, folders), read_run(write_run(tmp_path / "known", lines()))])
    assert [group.label for group in unknown.groups] == ["a", "b"] and not known.differs
    assert unknown.differs == "their settings are not known"


@pytest.mark.parametrize(
    ("optimizer", "groups"), [("adam", 1), ("one_bit_adam", 1), ("zero_one_adam", 2), ("my.Optimizer", 2)]
)
def test_settings_that_an_optimizer_does_not_read_make_no_group(tmp_path: Path, optimizer: str, groups: int) -> None:
    runs = [
        read_run(
            write_run(
                tmp_path / policy.replace(":", "-"),
                [one | {"optimizer": optimizer} for one in lines()],
                optimizer__optimizer=optimizer,
                optimizer__sync_policy=policy,
            )
        )
        for policy in ("schedule", "schedule:2")
    ]
    assert len(sections(runs)[0].groups) == groups
