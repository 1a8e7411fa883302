"""Specification and records of the study: what ``pretrain_and_finetune.py`` runs and ``study.py`` shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron01.errors import UserError
from megatron01.finetune.glue import TASKS

SECTIONS = {
    "prepare": str, "replicas": int, "seeds": list, "optimizers": dict,
    "bert": dict, "glue": dict, "gpt": dict, "digits": dict,
}  # fmt: skip
NEEDED = {
    "bert": {"flags", "rates"}, "glue": {"input", "tasks", "flags"}, "gpt": {"flags", "rates"},
    "digits": {"flags", "rates", "optimizers"},
}  # fmt: skip
KINDS = {"bert": "BERT", "gpt": "GPT-2", "digits": "ResNet-18 on digits"}


@dataclass(frozen=True)
class Spec:
    """What is trained and compared; the fields are the sections of the YAML file."""

    replicas: int
    seeds: list[int]
    optimizers: dict[str, str]
    prepare: str | None = None  # shell commands that make texts and vocabularies, run once before all
    bert: dict[str, Any] | None = None
    glue: dict[str, Any] | None = None
    gpt: dict[str, Any] | None = None
    digits: dict[str, Any] | None = None

    @classmethod
    def read(cls, path: Path) -> Spec:
        """Read from a YAML file. Raises UserError, naming the section, if it is invalid."""
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
        if not isinstance(values, dict):
            raise UserError(f"{path} holds no sections; expected {', '.join(SECTIONS)}")
        for name, value in values.items():
            if not isinstance(value, SECTIONS.get(name, ())) or value in ([], {}):
                raise UserError(f"{path}: {name} is {str(value)[:80]!r}; expected sections {', '.join(SECTIONS)}")
        if missing := {"replicas", "seeds", "optimizers"} - set(values):
            raise UserError(f"{path} lacks {', '.join(sorted(missing))}")
        for name in NEEDED.keys() & values.keys():
            if missing := NEEDED[name] - set(values[name]):
                raise UserError(f"{path}: section {name} lacks {', '.join(sorted(missing))}")
        if missing := set(values.get("glue", {}).get("tasks", ())) - TASKS.keys():
            raise UserError(f"{path}: glue has no task {', '.join(sorted(missing))}; expected {', '.join(TASKS)}")
        if "digits" in values and (missing := values["optimizers"].keys() - values["digits"]["optimizers"].keys()):
            raise UserError(f"{path}: digits.optimizers lacks {', '.join(sorted(missing))}")
        return cls(**values)


@dataclass(frozen=True)
class Run:
    """One training."""

    kind: str
    optimizer: str
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{KINDS[self.kind]}, {self.optimizer}, learning rate {self.rate:g}, seed {self.seed}"

    def folder(self, root: Path) -> Path:
        name = re.sub(r"\W+", "_", self.optimizer).strip("_").lower()
        return root / self.kind / f"{name}-{self.rate:g}-{self.seed}"


Record = dict[str, Any]
ByRate = dict[float, dict[int, Record]]


@dataclass
class Evidence:
    """The runs of a specification that are done."""

    spec: Spec
    records: dict[Run, Record] = field(default_factory=dict)  # lower ``score`` is better, None if it diverged
    counts: dict[str, float] = field(default_factory=dict)  # GLUE task -> logistic regression on word counts, per cent

    @classmethod
    def read(cls, path: Path) -> Evidence:
        """Read a file of ``write``. Raises UserError if it is invalid."""
        try:
            head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            records = {Run(**line.pop("run")): line for line in lines}
            return cls(Spec(**head["spec"]), records, head["counts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} holds no records of pretrain_and_finetune.py ({error})") from None

    def write(self, path: Path) -> None:
        """Write JSON lines: the specification and the counts, then the runs."""
        lines = [{"spec": asdict(self.spec), "counts": self.counts}]
        lines += [{"run": asdict(run)} | record for run, record in self.records.items()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    @property
    def baseline(self) -> str:
        return next(iter(self.spec.optimizers))

    def best_rate(self, kind: str, optimizer: str) -> float | None:
        """The learning rate with the lowest score with the first seed; None without runs."""
        runs = (Run(kind, optimizer, rate, self.spec.seeds[0]) for rate in self.rates(kind))
        scores = {run.rate: score for run in runs if (score := self.records.get(run, {}).get("score")) is not None}
        return min(scores, key=lambda rate: scores[rate]) if scores else None

    def rates(self, kind: str) -> list[float]:
        section = getattr(self.spec, kind)
        return [] if section is None else section["rates"]

    def chosen(self, kind: str, optimizer: str) -> list[float]:
        """The learning rates run with all seeds: the optimizer's own best and the baseline's best."""
        rates = (self.best_rate(kind, optimizer), self.best_rate(kind, self.baseline))
        return sorted({rate for rate in rates if rate is not None})

    def runs(self, kind: str) -> Iterator[tuple[Run, bool]]:
        """Each run in order, and True if its rate was chosen; later runs depend on earlier records."""
        for optimizer in self.spec.optimizers:
            for rate in self.rates(kind):
                yield Run(kind, optimizer, rate, self.spec.seeds[0]), False
        for seed in self.spec.seeds:
            for optimizer in self.spec.optimizers:
                for rate in self.chosen(kind, optimizer):
                    yield Run(kind, optimizer, rate, seed), True

    def of_chosen(self, kind: str) -> dict[str, ByRate]:
        """Optimizer -> rate -> seed -> record, of the chosen rates and the runs that did not diverge."""
        found: dict[str, ByRate] = {}
        for optimizer in self.spec.optimizers:
            for rate in self.chosen(kind, optimizer):
                for seed in self.spec.seeds:
                    record = self.records.get(Run(kind, optimizer, rate, seed))
                    if record is not None and record["score"] is not None:
                        found.setdefault(optimizer, {}).setdefault(rate, {})[seed] = record
        return found
