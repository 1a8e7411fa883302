"""Where a run goes on in its training data: in the same order, or at the beginning of a new one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron01.data import SampleCounts, Splits
from megatron01.training.data_order import DataOrder, Progress, build_in_order


@dataclass
class Data:
    """A dataset whose order depends on the epochs it takes, 100 samples each, as those of BERT and GPT-2."""

    length: int
    name: str

    @property
    def fingerprint(self) -> str:
        return f"{self.name} {-(-self.length // 100)}"


def order(progress: Progress, name: str, **changes: int) -> tuple[int, DataOrder]:
    def build(counts: SampleCounts) -> Splits[Any]:
        assert (counts.valid, counts.test) == (6, 6)
        return Splits(Data(counts.train, name), None, None)

    settings = {"train_iters": 30, "global_batch_size": 3, "eval_iters": 2} | changes
    datasets, result = build_in_order(build, progress, **settings)
    assert datasets.train is not None
    return datasets.train.length, result


def test_a_run_and_its_continuation() -> None:
    length, first = order(Progress(), "a")
    assert (length, first) == (90, DataOrder("a 1", 0))
    assert order(Progress(10, 30, first), "a") == (90, first)
    assert order(Progress(30, 90, first), "a") == (90, first)  # nothing is left to train
    assert order(Progress(10, 30, None), "a") == (90, first)  # a checkpoint that does not know its order


def test_another_order_is_taken_from_its_beginning() -> None:
    """The second phase: it begins after 10 steps of 3 samples and goes on for 20."""
    _, first = order(Progress(), "a")
    length, second = order(Progress(10, 30, first), "b")
    assert (length, second) == (60, DataOrder("b 1", 30))
    assert order(Progress(15, 45, second), "b") == (60, second)
    assert order(Progress(15, 45, second), "c") == (45, DataOrder("c 1", 45))


def test_a_longer_run_keeps_its_order_while_the_epochs_are_the_same() -> None:
    _, first = order(Progress(), "a")
    assert order(Progress(10, 30, first), "a", train_iters=33) == (99, first)
    length, longer = order(Progress(10, 30, first), "a", train_iters=90)
    assert (length, longer) == (240, DataOrder("a 3", 30))


def test_another_batch_size() -> None:
    _, first = order(Progress(), "a")
    assert order(Progress(10, 30, first), "a", global_batch_size=3, train_iters=20) == (60, first)
    assert order(Progress(30, 90, first), "a", train_iters=40)[0] == 30
