"""Where a resumed run continues in its training data: in the same order, or at the beginning of a new one."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron01.checkpoint.manifest import CheckpointMetadata, iteration_folder
from megatron01.config import DataConfig, DistributedConfig, PretrainConfig, TrainingConfig
from megatron01.data import SampleCounts, Splits
from megatron01.errors import UserError
from megatron01.parallel import LaunchEnvironment, find_tensor_parallel_ranks, initialize
from megatron01.training.data import DataOrder, RunData, SavedProgress, build_in_order, saved_progress


@dataclass
class Data:
    """A dataset whose order depends on its number of epochs, of 100 samples each, as with BERT and GPT-2."""

    length: int
    name: str

    @property
    def fingerprint(self) -> str:
        return f"{self.name} {-(-self.length // 100)}"

    def __len__(self) -> int:
        return self.length


def order(progress: SavedProgress, name: str, **changes: int) -> tuple[int, DataOrder]:
    def build(counts: SampleCounts) -> Splits:
        assert (counts.valid, counts.test) == (6, 6)
        return Splits(Data(counts.train, name), None, None)

    settings = {"train_iters": 30, "global_batch_size": 3} | changes
    training = TrainingConfig(eval_iters=2, **settings)
    datasets, result = build_in_order(build, progress, training, settings["global_batch_size"])
    assert datasets.train is not None
    return datasets.train.length, result


def test_a_run_and_its_continuation() -> None:
    length, first = order(SavedProgress(), "a")
    assert (length, first) == (90, DataOrder("a 1", 0))
    assert order(SavedProgress(10, 30, first), "a") == (90, first)
    assert order(SavedProgress(30, 90, first), "a") == (90, first)  # nothing is left to train
    assert order(SavedProgress(30, 90, first), "a", train_iters=20) == (90, first)
    assert order(SavedProgress(10, 30, None), "a") == (90, first)  # a checkpoint without a recorded order


def test_another_order_is_taken_from_its_beginning() -> None:
    """A second phase: it begins after 10 steps of 3 samples and takes 20 steps."""
    _, first = order(SavedProgress(), "a")
    length, second = order(SavedProgress(10, 30, first), "b")
    assert (length, second) == (60, DataOrder("b 1", 30))
    assert order(SavedProgress(15, 45, second), "b") == (60, second)
    assert order(SavedProgress(15, 45, second), "c") == (45, DataOrder("c 1", 45))
    assert order(SavedProgress(30, 90, second), "c") == (3, DataOrder("c 1", 90))  # a batch, though nothing is left


def test_a_longer_run_keeps_its_order_while_the_epochs_are_the_same() -> None:
    _, first = order(SavedProgress(), "a")
    assert order(SavedProgress(10, 30, first), "a", train_iters=33) == (99, first)
    length, longer = order(SavedProgress(10, 30, first), "a", train_iters=90)
    assert (length, longer) == (240, DataOrder("a 3", 30))


def test_another_batch_size() -> None:
    _, first = order(SavedProgress(), "a")
    assert order(SavedProgress(10, 30, first), "a", global_batch_size=3, train_iters=20) == (60, first)
    assert order(SavedProgress(30, 90, first), "a", train_iters=40)[0] == 30


def taken(order: DataOrder, num_samples: int) -> list[int]:
    return list(itertools.chain.from_iterable(range(*bounds) for bounds in order.ranges(num_samples)))


@given(st.integers(1, 60), st.integers(0, 9), st.data())
def test_samples_that_are_deferred_come_last(num_samples: int, before: int, data: st.DataObject) -> None:
    order = DataOrder("a", before)
    expected = list(range(num_samples))
    for _ in range(data.draw(st.integers(1, 4))):
        first = data.draw(st.integers(0, num_samples))
        skipped = data.draw(st.integers(0, num_samples - first))
        order = order.deferring(before + first, skipped, num_samples)
        expected = [*expected[:first], *expected[first + skipped :], *expected[first : first + skipped]]
        assert taken(order, num_samples) == expected
    assert taken(order, num_samples + 7) == [*expected, *range(num_samples, num_samples + 7)]
    fewer = num_samples // 2
    assert taken(order, fewer) == [sample for sample in expected if sample < fewer]
    assert all(first < last for first, last in order.ranges(fewer))


@pytest.mark.parametrize(
    ("batch_size", "length", "order"),
    [
        (3, 60, DataOrder("a 1", 0, [(0, 30), (45, 60), (30, 45)])),
        (4, 70, DataOrder("a 1", 0, [(0, 30), (45, 65), (30, 45)])),  # the last 5 follow what is deferred
        (8, 80, DataOrder("a 1", 30)),  # 110 samples take a second epoch, so the order is begun anew
    ],
)
def test_a_roll_back_of_steps_with_smaller_batches(batch_size: int, length: int, order: DataOrder) -> None:
    """Steps 10 to 15 of 20, of 3 samples each, are taken again with ``batch_size``."""

    def build(counts: SampleCounts) -> Splits:
        return Splits(Data(counts.train, "a"), None, None)

    distributed = DistributedConfig(distributed_backend="gloo")
    training = TrainingConfig(train_iters=20, global_batch_size=batch_size, micro_batch_size=1)
    with initialize(LaunchEnvironment(), distributed) as group:
        progress, ranks = SavedProgress(15, 45, DataOrder("a 1", 0)), find_tensor_parallel_ranks(group, distributed)
        data = RunData(PretrainConfig(training=training), group, ranks, progress, build)
        data.defer(10, 30, 15)
    assert (len(data.datasets.train), data.order) == (length, order)


def test_batches_begin_after_what_was_taken_of_the_present_order(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("megatron01.training.data.BatchLoader", lambda _, **settings: given.append(settings) or [])
    distributed = DistributedConfig(distributed_backend="gloo")
    training = TrainingConfig(train_iters=20, global_batch_size=3, micro_batch_size=1)
    with initialize(LaunchEnvironment(), distributed) as group:
        progress, ranks = SavedProgress(15, 45, DataOrder("a 1", 30)), find_tensor_parallel_ranks(group, distributed)
        config = PretrainConfig(training=training, data=DataConfig(num_workers=3))
        data = RunData(config, group, ranks, progress, lambda counts: Splits(Data(counts.train, "a"), None, None))
        assert list(data.training_batches(45)) == []
    (settings,) = given
    assert (settings["consumed_samples"], settings["segments"], settings["num_workers"]) == (15, [(0, 30)], 3)


def test_an_evaluation_takes_a_micro_batch_for_each_replica() -> None:
    def build(counts: SampleCounts) -> Splits:
        return Splits(Data(counts.train, "a"), Data(5, "a"), None)

    distributed = DistributedConfig(distributed_backend="gloo")
    config = PretrainConfig(training=TrainingConfig(train_iters=2, global_batch_size=6, micro_batch_size=2))
    with initialize(LaunchEnvironment(), distributed) as group:
        ranks = dataclasses.replace(find_tensor_parallel_ranks(group, distributed), num_replicas=3)
        with pytest.raises(UserError, match="the valid data holds 5 samples, but an evaluation takes 6 at least"):
            RunData(config, group, ranks, SavedProgress(), build)


def test_the_order_survives_a_checkpoint() -> None:
    _, first = order(SavedProgress(), "a")
    later = first.deferring(30, 12, 90)
    saved = DataOrder(**vars(later))
    assert order(SavedProgress(10, 30, saved), "a") == (90, later)
    assert order(SavedProgress(10, 30, saved), "b")[1].segments == ()
    assert dataclasses.replace(later, segments=()) == first


DAMAGED: list[dict[str, Any]] = [{"fingerprint": "a"}, {"fingerprint": "a", "first_sample": 0, "more": 1}]


@pytest.mark.parametrize("saved", DAMAGED)
def test_a_checkpoint_with_a_damaged_order_is_refused(tmp_path: Path, saved: dict[str, Any]) -> None:
    for values in ({"fingerprint": "a", "first_sample": 24, "segments": [[3, 5], [0, 3]]}, saved):
        metadata = CheckpointMetadata(
            iteration=3,
            consumed_samples=24,
            world_size=1,
            optimizer="adam",
            tokenizer_fingerprint="",
            parameters={},
            device="cpu",
            replicas=({"data_order": values},),
        )
        checkpoint = iteration_folder(tmp_path, 3)
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "metadata.json").write_text(metadata.to_json())
        if values is not saved:
            assert saved_progress((tmp_path, 3)).consumed_samples == 24
    with pytest.raises(UserError, match="its samples are invalid") as caught:
        saved_progress((tmp_path, 3))
    assert "\n" not in str(caught.value)
