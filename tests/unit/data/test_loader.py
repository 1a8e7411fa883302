"""The loader: which replica gets which sample, resume by one integer, and errors in worker processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron01.errors import FaultError, UserError
from tests.tiers import slow_after
from tests.unit.data.conftest import loader_of

sizes = st.integers(1, 4)


class Squares:
    """Sample i holds i and i squared."""

    def __init__(self, length: int = 64, *, fail_at: int | None = None, error: BaseException | None = None) -> None:
        self._length, self._fail_at, self._error = length, fail_at, error

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        if index == self._fail_at:
            if self._error is None:
                os._exit(7)
            raise self._error
        return {"value": np.array(index), "row": np.array([index, index**2])}


def order(num_samples: int, consumed: int, batch: int, replica: int, replicas: int) -> list[list[int]]:
    """The samples of each batch; none if there is no batch."""
    try:
        loader = loader_of(
            Squares(num_samples),
            consumed_samples=consumed,
            micro_batch_size=batch,
            replica=replica,
            num_replicas=replicas,
        )
    except UserError:
        return []
    batches = [batch["value"].tolist() for batch in loader]
    assert len(loader) == len(batches) > 0
    return batches


@given(num_samples=st.integers(0, 60), consumed=st.integers(0, 60), batch=sizes, replicas=sizes)
def test_replicas_share_each_sample_once(num_samples: int, consumed: int, batch: int, replicas: int) -> None:
    orders = [order(num_samples, consumed, batch, replica, replicas) for replica in range(replicas)]
    blocks = max(0, num_samples - consumed) // (batch * replicas)
    assert all(len(order) == blocks for order in orders)
    taken = [index for step in zip(*orders, strict=True) for indices in step for index in indices]
    assert taken == list(range(consumed, consumed + blocks * batch * replicas))


@given(data=st.data(), num_samples=st.integers(0, 120))
def test_stops_and_other_numbers_of_replicas_lose_and_repeat_nothing(data: st.DataObject, num_samples: int) -> None:
    """A run is stopped after any step and resumed with other numbers of replicas and micro-batch sizes, repeatedly."""
    taken: list[int] = []
    for _ in range(5):
        batch, replicas = data.draw(sizes), data.draw(sizes)
        orders = [order(num_samples, len(taken), batch, replica, replicas) for replica in range(replicas)]
        steps = data.draw(st.integers(0, len(orders[0])))
        for _, *blocks in zip(range(steps), *orders, strict=False):
            taken += [index for block in blocks for index in block]
    taken += [index for block in order(num_samples, len(taken), 1, 0, 1) for index in block]
    assert taken == list(range(num_samples))


@settings(max_examples=20)
@given(batch=sizes, replicas=sizes, steps=st.integers(0, 3))
def test_resume_continues_the_sequence(batch: int, replicas: int, steps: int) -> None:
    def values(consumed: int) -> list[list[int]]:
        loader = loader_of(
            Squares(), consumed_samples=consumed, micro_batch_size=batch, replica=replicas - 1, num_replicas=replicas
        )
        return [batch["value"].tolist() for batch in loader]

    assert values(steps * batch * replicas) == values(0)[steps:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_in_order_and_can_be_iterated_again(num_workers: int) -> None:
    loader = loader_of(Squares(21), consumed_samples=3, replica=1, num_replicas=2, num_workers=num_workers)
    state = torch.random.get_rng_state()
    for _ in range(2):
        batches = list(loader)
        assert [batch["value"].tolist() for batch in batches] == [[5, 6], [9, 10], [13, 14], [17, 18]]
        assert all(torch.equal(batch["row"][:, 1], batch["value"] ** 2) for batch in batches)
    assert len(loader) == 4
    assert torch.equal(torch.random.get_rng_state(), state)  # dropout must not depend on the loader


def test_segments_are_taken_in_their_order() -> None:
    loader = loader_of(Squares(12), consumed_samples=1, segments=[(3, 5), (0, 3), (8, 11)])
    assert [batch["value"].tolist() for batch in loader] == [[4, 0], [1, 2], [8, 9]]


@pytest.mark.parametrize("consumed", [62, 64, 100])
def test_nothing_left(consumed: int) -> None:
    with pytest.raises(UserError, match=f"no samples are left: {consumed} of 64 are consumed"):
        loader_of(Squares(), consumed_samples=consumed, num_replicas=2)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (UserError("bad.bin is damaged"), UserError, r"^samples 8 to 11: bad.bin is damaged$"),
        (OSError(errno.EIO, "Input/output error", "a.bin"), FaultError, r"^samples 8 to 11: .* error: 'a.bin'$"),
        (KeyError("some key"), RuntimeError, r"^samples 8 to 11: KeyError: 'some key'\nTraceback"),
    ],
)
def test_error_in_a_sample(num_workers: int, error: Exception, raised: type[Exception], message: str) -> None:
    before = set(multiprocessing.active_children())
    loader = loader_of(Squares(fail_at=9, error=error), micro_batch_size=4, num_workers=num_workers)
    batches = iter(loader)
    assert next(batches)["value"].tolist() == [0, 1, 2, 3]
    next(batches)
    with pytest.raises(raised, match=message):
        next(batches)
    del loader, batches
    assert set(multiprocessing.active_children()) == before  # workers end at once, not with a collection of garbage


class Given:
    """The samples of a list."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


@pytest.mark.parametrize("sample", [torch.arange(4), (torch.arange(4), torch.arange(4)), np.arange(4), [0, 1]])
def test_samples_that_are_no_dictionaries(sample: object) -> None:
    dataset = Given([sample] * 8)
    loader = loader_of(dataset)
    with pytest.raises(UserError, match=rf"^samples 0 to 1: Given\[0\] is a {type(sample).__name__}; expected a dict"):
        next(iter(loader))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("others", [("a text", "another"), ([1, 2], [1, 2, 3]), (torch.zeros(2), torch.zeros(3))])
def test_samples_that_cannot_be_stacked(num_workers: int, others: tuple[Any, Any]) -> None:
    dataset = Given([{"value": 3, "other": other} for other in others])
    loader = loader_of(dataset, num_workers=num_workers)
    with pytest.raises(UserError, match=r"^samples 0 to 1: 'other' of Given cannot be stacked \(.*; expected numbers"):
        next(iter(loader))


def test_tensors_lists_and_numbers_are_stacked() -> None:
    dataset = Given([{"tensor": torch.tensor([i, i + 1]), "list": [0.5, i], "number": i} for i in range(2)])
    loader = loader_of(dataset)
    (batch,) = loader
    assert batch["tensor"].tolist() == [[0, 1], [1, 2]] and batch["number"].tolist() == [0, 1]
    assert batch["list"].tolist() == [[0.5, 0], [0.5, 1]]


def test_killed_worker() -> None:
    loader = loader_of(Squares(fail_at=9), micro_batch_size=4, num_workers=1)
    with pytest.raises(FaultError, match="a process that prepares batches ended unexpectedly"):
        list(loader)


def test_a_killed_worker_is_noticed_where_a_batch_is_asked_for_and_nowhere_else() -> None:
    loader = loader_of(Squares(6400), micro_batch_size=4, num_workers=1)
    before = set(multiprocessing.active_children())
    batches = iter(loader)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    worker.kill()
    worker.join()  # torch would raise here
    with pytest.raises(UserError, match=r"ended unexpectedly \(DataLoader worker \d+ ended with status -9\)"):
        next(batches)


PROGRAM = """
import os, signal, sys, time
from megatron01.data import BatchLoader
from tests.unit.data.test_loader import Squares

loader = BatchLoader(Squares(6400), consumed_samples=0, micro_batch_size=4, replica=0, num_replicas=1, num_workers=2)
batches = iter(loader)
next(batches)
if sys.argv[1] == "signal":
    next(batches)  # batches come from the workers in turn: now both run
    signal.signal(signal.SIGTERM, lambda *_: None)
    for _ in range(2):  # a launcher forwards a signal that all processes also get themselves
        os.killpg(os.getpid(), signal.SIGTERM)
        time.sleep(0.25)
    assert sum(1 for _ in batches) == 1598
if sys.argv[1] == "error":
    raise KeyError("in training")
print("end")
"""


@pytest.mark.parametrize(
    ("case", "status", "out", "err"),
    slow_after(1, [("signal", 0, "end\n", ""), ("end", 0, "end\n", ""), ("error", 1, "", "KeyError")]),
)
def test_process_ends_with_its_workers_in_use(case: str, status: int, out: str, err: str) -> None:
    """Workers survive a signal to the process group (the replica then saves), but not the end of the replica."""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, case],
        cwd=Path(__file__).resolve().parents[3],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (process.returncode, process.stdout) == (status, out), process.stderr
    assert process.stderr.strip().splitlines()[-1:] == ([] if not err else ["KeyError: 'in training'"])
