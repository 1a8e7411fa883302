"""Markdown tables of the runs' results: losses, gaps to Adam paired by seed, and bits sent."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy import stats

from megatron01.utils.formatting import markdown

BASELINE = "adam"


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file; an incomplete last line, left by a killed sweep, is removed from the file.

    Raises:
        SystemExit: it is not a results file; the file is left unchanged.
    """
    if not path.exists():
        return []
    try:
        text = path.read_bytes()
        complete = text[: text.rfind(b"\n") + 1]
        records = [json.loads(line) for line in complete.splitlines()]
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} holds no results, a JSON object a line ({error}); give another file") from None
    rest = text[len(complete) :]
    if not all(isinstance(record, dict) for record in records) or (rest and not rest.startswith(b"{")):
        raise SystemExit(f"{path} holds no results, a JSON object a line; give another file")
    if rest and _is_json(rest):
        raise SystemExit(f"{path} does not end in a new line; expected one after each result")
    if rest:
        path.write_bytes(complete)
    return records


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


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


def gaps(records: list[dict[str, Any]]) -> str:
    """A table for each task and length of run: losses, and gaps to the baseline at its best rate, paired by seed.

    ``gap`` is the mean over the seeds that both have, with the half width of its 95 % confidence interval (Student's t
    over paired differences).
    """
    parts = []
    for setup in dict.fromkeys(_setup(record) for record in records):
        chosen = [record for record in records if _setup(record) == setup]
        task, steps, replicas, size = setup
        parameters, tokens = chosen[0]["parameters"] / 1e3, chosen[0]["tokens"] / 1e3
        results = collect(chosen)
        baseline = next((result for result in results if result.name == BASELINE), None)
        best = None if baseline is None else baseline.losses[baseline.best_rate]
        header = ["optimizer", "learning rate", "seeds", "held-out loss", "gap to Adam's best rate", "bits"]
        rows = []
        for result in results:
            for rate, losses in sorted(result.losses.items()):
                finite = [loss for loss in losses.values() if math.isfinite(loss)]
                rows.append(
                    [
                        result.name,
                        f"{rate:.2g}",
                        str(len(losses)),
                        f"{mean(finite):.4f}"
                        if len(finite) == len(losses)
                        else f"{len(losses) - len(finite)} diverged",
                        "" if best is None or losses is best else _gap(losses, best),
                        f"{mean(result.bits[rate]):.3g}" if result.name != BASELINE else "",
                    ]
                )
        trained = f"{parameters:.0f} k parameters, {replicas} replicas, {steps} steps, {tokens:.0f} k tokens"
        parts += [
            f"## {task}, {size}: {trained}\n",
            markdown([header, *rows]),
        ]
    made = [sorted({str(record.get(key)) for record in records}) for key in ("revision", "machine", "date")]
    return "\n".join([*parts, f"Runs: {len(records)}. " + "; ".join(", ".join(names) for names in made) + ".\n"])


def _gap(losses: dict[int, float], baseline: dict[int, float]) -> str:
    differences = [losses[seed] - baseline[seed] for seed in losses if seed in baseline]
    if not differences or not math.isfinite(sum(differences)):
        return ""
    if len(differences) == 1:
        return f"{differences[0]:+.4f}"
    half = stats.t.ppf(0.975, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return f"{mean(differences):+.4f} ± {half:.4f}"


def _setup(record: dict[str, Any]) -> tuple[Any, ...]:
    """The settings that results in one table have in common."""
    return tuple(record["run"][key] for key in ("task", "steps", "replicas", "size"))


def collect(records: list[dict[str, Any]]) -> list[Result]:
    """One result per optimizer and settings: the baseline first, then in the order of the records."""
    results: dict[str, Result] = {}
    for record in records:
        run = record["run"]
        key = json.dumps([run["optimizer"], run["overrides"], run.get("nodes"), run.get("replica")], sort_keys=True)
        result = results.setdefault(key, Result(record["name"]))
        loss = record["held_out_loss"]
        result.losses[run["learning_rate"]][run["seed"]] = math.inf if loss is None else loss
        result.bits[run["learning_rate"]].append(record["bits_per_parameter"])
    return sorted(results.values(), key=lambda result: result.name != BASELINE)
