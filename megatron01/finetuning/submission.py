"""Predictions for test sets as the GLUE server takes them: ``TASK.tsv`` with the columns index and prediction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron01.errors import UserError
from megatron01.files import write_atomically
from megatron01.finetuning.glue_data import Example
from megatron01.finetuning.tasks import MAX_SCORE, Task


def predictions(task: Task, outputs: NDArray[np.float32]) -> list[str]:
    """What the server gets for each example: the name of a class, or a score from 0 to 5 with three digits.

    Args:
        task: which one.
        outputs: of the head, [examples, outputs].
    """
    if task.is_regression:
        return [f"{score:.3f}" for score in np.clip(np.nan_to_num(outputs[:, 0]), 0.0, MAX_SCORE)]
    return [task.labels[number] for number in outputs.argmax(axis=1)]


def write_submission(path: Path, examples: Sequence[Example], predicted: Sequence[str]) -> None:
    """Write one file of a submission.

    Raises:
        UserError: if it cannot be written.
    """
    lines = [f"{example.index}\t{value}\n" for example, value in zip(examples, predicted, strict=True)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "index\tprediction\n" + "".join(lines))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
