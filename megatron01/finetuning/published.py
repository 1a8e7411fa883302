"""Published results that a sweep's are shown beside, and those that a user adds."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron01.errors import UserError, nearest


@dataclass(frozen=True)
class TableRow:
    """A row of the comparison: the name of a model, and percentages by the titles of columns."""

    model: str
    values: Mapping[str, float]


_TITLES = ("RTE", "MRPC", "CoLA", "SST-2", "QNLI", "QQP", "MNLI-m", "MNLI-mm")
_GLUE = {
    "BERT-Base (original)": (66.4, 84.8, 52.1, 93.5, 90.5, 89.2, 84.6, 83.4),
    "BERT-Base (Adam)": (68.2, 84.8, 56.8, 91.8, 90.9, 90.9, 83.6, 83.5),
    "BERT-Base (1-bit Adam)": (69.0, 84.8, 55.6, 91.6, 90.8, 90.9, 83.6, 83.9),
    "BERT-Large (original)": (70.1, 85.4, 60.5, 94.9, 92.7, 89.3, 86.7, 85.9),
    "BERT-Large (Adam)": (70.3, 86.0, 60.3, 93.1, 92.2, 91.4, 86.1, 86.2),
    "BERT-Large (1-bit Adam)": (70.4, 86.1, 62.0, 93.8, 91.9, 91.5, 85.7, 85.4),
}

PUBLISHED = tuple(TableRow(model, dict(zip(_TITLES, values, strict=True))) for model, values in _GLUE.items())
"""Tang et al., "1-bit Adam" (ICML 2021), as printed in its announcement by DeepSpeed (2020-09-09), Table 1: development
sets, MRPC and QQP as accuracy. The "original" rows are those of Devlin et al. (2019), from the test server."""

NOTE = (
    "Published rows: Tang et al., 1-bit Adam (development sets; MRPC and QQP: accuracy; original: Devlin et al., test"
    " sets). Those of 0/1 Adam are not at hand; --published adds rows."
)


def read_published(path: Path, titles: tuple[str, ...]) -> list[TableRow]:
    """The rows of a user's CSV file, in per cent: a column ``model``, and any of ``titles``.

    Raises:
        UserError: if it cannot be read, lacks the column, or holds what is no number.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or []
            for name in names:
                if name != "model" and name not in titles:
                    raise UserError(
                        f"{path} has a column {name!r}{nearest(name, titles)}; expected {', '.join(titles)}"
                    )
            if "model" not in names:
                raise UserError(f"{path} has no column 'model', only {', '.join(names) or 'nothing'}")
            return [_row(entries, f"{path} line {reader.line_num}") for entries in reader]
    except OSError as error:
        raise UserError(f"published {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is no CSV file ({error})") from error


def _row(entries: Mapping[str, str | None], place: str) -> TableRow:
    if None in entries:  # where DictReader puts what is left over
        raise UserError(f"{place} has more cells than columns")
    if not entries["model"]:
        raise UserError(f"{place} names no model")
    values = {}
    for title, text in entries.items():
        if title == "model" or not text or text.strip() in ("", "-"):
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not -100 <= value <= 100:
            raise UserError(f"{place}: {title} is {text!r}; expected a number in per cent")
        values[title] = value
    return TableRow(entries["model"], values)
