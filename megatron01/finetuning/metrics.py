"""The metrics of GLUE, by scikit-learn and scipy."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

from megatron01.errors import UserError
from megatron01.finetuning.tasks import Task

PACKAGES = "pip install 'megatron01[finetune]'"


def score(task: Task, outputs: NDArray[np.float32], labels: NDArray[np.float64]) -> dict[str, float]:
    """The metrics of a task, as its results' columns name them without the suffix of a set; 1 is best.

    A correlation with outputs that are all equal, which is not defined, is 0, as the Matthews correlation is.

    Args:
        task: which one.
        outputs: of the head, float32[examples, classes], or [examples, 1] for scores.
        labels: numbers of the classes, or scores: float64[examples].
    """
    if task.is_regression:
        return _correlations(outputs[:, 0].astype(np.float64), labels)
    predicted, expected = outputs.argmax(axis=1), labels.astype(np.int64)
    metrics = {column.metric.removesuffix("_matched").removesuffix("_mismatched") for column in task.columns}
    return {name: _classification(name, expected, predicted) for name in sorted(metrics)}


def _classification(name: str, expected: NDArray[np.int64], predicted: NDArray[np.int64]) -> float:
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    if name == "f1":
        return float(f1_score(expected, predicted, labels=[0, 1], zero_division=0.0))
    if name == "matthews":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about a single class, for which it is 0
            return float(matthews_corrcoef(expected, predicted))
    assert name == "accuracy", name
    return float(accuracy_score(expected, predicted))


def _correlations(outputs: NDArray[np.float64], expected: NDArray[np.float64]) -> dict[str, float]:
    from scipy.stats import ConstantInputWarning, NearConstantInputWarning, pearsonr, spearmanr

    if outputs.size < 2:
        return {"pearson": 0.0, "spearman": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        warnings.simplefilter("ignore", NearConstantInputWarning)
        values = {"pearson": pearsonr(outputs, expected), "spearman": spearmanr(outputs, expected)}
    return {name: float(np.nan_to_num(value.statistic)) for name, value in values.items()}


def check_packages() -> None:
    """Make sure that what fine-tuning needs is installed.

    Raises:
        UserError: naming the extra to install.
    """
    try:
        import scipy
        import sklearn
        import transformers
    except ImportError as error:
        raise UserError(f"fine-tuning needs {error.name}, which is not installed; {PACKAGES}") from error
    assert scipy and sklearn and transformers
