"""From the results of runs to Markdown: the tuned loss of each optimizer, its spread over seeds, and what it sent."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy import stats

BASELINE = "adam"


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file; an unfinished last line, of a sweep that was killed, is cut off the file."""
    if not path.exists():
        return []
    text = path.read_bytes()
    complete = text[: text.rfind(b"\n") + 1]
    if len(complete) < len(text):
        path.write_bytes(complete)
    return [json.loads(line) for line in complete.splitlines()]


@dataclass
class Result:
    """All runs of one optimizer with one set of settings: losses and bits per parameter by learning rate and seed."""

    name: str
    losses: defaultdict[float, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    bits: defaultdict[float, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def best_rate(self) -> float:
        """The learning rate with the lowest mean loss, among those run with the most seeds."""
        most = max(len(by_seed) for by_seed in self.losses.values())
        return min((rate for rate, by_seed in self.losses.items() if len(by_seed) == most), key=self.mean_loss)

    def mean_loss(self, rate: float) -> float:
        return mean(self.losses[rate].values())

    def best_losses(self) -> list[float]:
        """The losses at the best learning rate, by seed."""
        return [loss for _, loss in sorted(self.losses[self.best_rate].items())]


def tables(records: list[dict[str, Any]]) -> str:
    """A table, and the sweep behind it, for each task and length of run in ``records``."""
    parts = []
    for setup in dict.fromkeys(_setup(record) for record in records):
        chosen = [record for record in records if _setup(record) == setup]
        task, steps, replicas, size = setup
        tokens, parameters = chosen[0]["tokens"] / 1e3, chosen[0]["parameters"] / 1e6
        results = collect(chosen)
        parts += [
            f"## {task}, {size}: {parameters:.2f} M parameters, {replicas} replicas, "
            f"{steps} steps, {tokens:.0f} k tokens\n",
            summary(results),
            "Held-out loss with the first seed, by learning rate:\n",
            sweep(results),
        ]
    revisions = ", ".join(sorted({record["revision"] for record in records}))
    return "\n".join([*parts, f"Runs: {len(records)}. Revisions: {revisions}.\n"])


def _setup(record: dict[str, Any]) -> tuple[Any, ...]:
    """What results must share to stand in one table."""
    return tuple(record["run"][key] for key in ("task", "steps", "replicas", "size"))


def collect(records: list[dict[str, Any]]) -> list[Result]:
    """One result for each optimizer and its settings, the baseline first, else in the order of the records."""
    results: dict[str, Result] = {}
    for record in records:
        run = record["run"]
        key = json.dumps([run["optimizer"], run["overrides"], run.get("nodes"), run.get("replica")], sort_keys=True)
        result = results.setdefault(key, Result(record["name"]))
        loss = record["held_out_loss"]
        result.losses[run["learning_rate"]][run["seed"]] = math.inf if loss is None else loss
        result.bits[run["learning_rate"]].append(record["bits_per_parameter"])
    return sorted(results.values(), key=lambda result: result.name != BASELINE)


def summary(results: list[Result]) -> str:
    """Loss at the best learning rate, gap to the baseline and bits, one line for each result."""
    baseline = next((result.best_losses() for result in results if result.name == BASELINE), None)
    rows = []
    for result in results:
        losses = result.best_losses()
        rows.append(
            [
                result.name,
                f"{result.best_rate:.3g}",
                str(sum(len(by_seed) for by_seed in result.losses.values())),
                _loss(mean(losses)),
                f"{stdev(losses):.4f}" if len(losses) > 1 and math.isfinite(sum(losses)) else "",
                str(len(losses)),
                *(("", "") if baseline is None or result.name == BASELINE else _comparison(losses, baseline)),
                f"{mean(result.bits[result.best_rate]):.3g}",
            ]
        )
    header = ["optimizer", "best lr", "runs", "held-out loss", "std", "seeds", f"gap to {BASELINE}", "p"]
    return markdown([*header, "bits per parameter and step"], rows)


def sweep(results: list[Result]) -> str:
    """Loss of each result at each learning rate with the lowest seed, that of the sweep."""
    rates = sorted({rate for result in results for rate in result.losses})
    first = min(seed for result in results for by_seed in result.losses.values() for seed in by_seed)
    rows = [
        [
            result.name,
            *(_loss(by_seed[first]) if first in (by_seed := result.losses.get(rate, {})) else "" for rate in rates),
        ]
        for result in results
    ]
    return markdown(["optimizer", *(f"{rate:.3g}" for rate in rates)], rows)


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"


def _comparison(losses: list[float], baseline: list[float]) -> tuple[str, str]:
    """Difference of the means, and p of Welch's two-sided t-test, which does not take the spreads to be equal."""
    if not math.isfinite(sum(losses) + sum(baseline)):
        return "", ""
    gap = f"{mean(losses) - mean(baseline):+.4f}"
    if min(len(losses), len(baseline)) < 2:
        return gap, ""
    return gap, f"{stats.ttest_ind(losses, baseline, equal_var=False).pvalue:.2g}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """First column to the left and all others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
