"""The functions that a training step calls, which a reader of a 1-bit step has to read."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import patch

import megatron01
from megatron01.pretraining import GPT
from megatron01.training import Trainer, pretrain
from tests.distributed.harness import run_ranks
from tests.integration.tiny import gpt_config

PACKAGE = Path(megatron01.__file__).parent
MOST_FILES, MOST_FUNCTIONS = 29, 124
"""They may only sink: the goals are 15 and 70."""


@contextmanager
def functions_called() -> Iterator[set[CodeType]]:
    """Code objects of the package that run inside: functions, methods, lambdas, comprehensions, compiled kernels."""
    found: set[CodeType] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            found.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def one_bit_steps(rank: int, world_size: int, config: Any) -> list[dict[str, list[str]]]:
    """For each 1-bit step of a run the functions that it calls, by file."""
    steps = []
    train_step = Trainer.train_step

    def profiled(trainer: Trainer, batches: Any) -> None:
        with functions_called() as found:
            train_step(trainer, batches)
        report = trainer.optimizer.last_step
        if report is not None and report.kind == "one_bit":
            by_file = defaultdict(list)
            for code in sorted(found, key=lambda code: code.co_firstlineno):
                name = f"{code.co_qualname}:{code.co_firstlineno}"
                by_file[str(Path(code.co_filename).relative_to(PACKAGE))].append(name)
            steps.append(dict(by_file))

    with patch.object(Trainer, "train_step", profiled):
        pretrain(config, GPT.build_datasets, GPT.build_model, GPT.forward_step)
    return steps


def test_a_1_bit_step_runs_through_no_more_code_than_it_did(corpus: Path, tmp_path: Path) -> None:
    config = gpt_config(corpus, eval_iters=0, run_dir=str(tmp_path))
    steps, _ = run_ranks(one_bit_steps, 2, config, default_group=False)
    assert len(steps) > 2
    last = steps[-1]
    listed = "\n".join(f"{len(names):4} {file}: {', '.join(names)}" for file, names in sorted(last.items()))
    assert len(last) <= MOST_FILES and sum(map(len, last.values())) <= MOST_FUNCTIONS, listed
