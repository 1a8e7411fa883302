"""Error of the step times that ``megatron01 plan`` predicts for ``slow_network.py``, and regret of its advice.

    python benchmarks/plan_check.py          # reads results/slow_network.jsonl, writes results/plan.md

The costs of this machine (latency of a message, CPU time of a byte and of an exchange) are fitted to the times at the
two highest link rates; times at the other rates are predicted with them. Where ``slow_network.py --advise`` has let
``--auto`` measure the links itself, that advice is compared with the best choice too. Nothing is run.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from convergence_run import SHAPES, Run, build_config
from hosts import bits_per_second
from records import read_records
from reporting import ROOT
from rivals.entries import ALONE, BASELINE, ENTRIES
from scipy.optimize import least_squares
from slow_network_lab import NO_HOSTS
from slow_network_table import Setting, settings

from megatron01.config import OptimizerConfig
from megatron01.config.registry import find_optimizer
from megatron01.cost.cluster import Cluster
from megatron01.cost.run_time import Choice, RunTime, StepModel, Work, recommend, run_time
from megatron01.cost.volume import full_step_bytes
from megatron01.utils.formatting import markdown

OURS = "zero_one_adam_from_2"
"""0/1 Adam with its default intervals."""
PLANNED = (BASELINE, "one_bit_adam", "zero_one_adam_every", OURS)
"""Contestants that ``plan`` knows, from the most exact on."""
FITTED_RATES = 2
NEARLY_FULL = 0.9  # share of a cap: link rates that a busy machine does not reach are not used for the fit
FRAME, SEGMENT = 1514, 1448  # bytes: a full frame, and its payload
DDP_BUCKET_BYTES = 0.25e6  # as in the benchmark's baselines
Line = dict[str, Any]


class Point(NamedTuple):
    """The mean seconds of one kind of step of one contestant at one rate."""

    contestant: str
    rate: str
    kind: str
    seconds: float


class Machine(NamedTuple):
    """Fitted costs, in seconds."""

    latency: float  # of a message
    sending: float  # CPU time for each byte sent or received
    exchange: float  # CPU time for the exchange of each bucket
    step: float  # extra time of a step of this library's optimizers over one of AdamW


class Predictions:
    """Performance model of the hosts, fitted to one setting."""

    def __init__(self, setting: Setting, data: Path) -> None:
        self.setting = setting
        described = Run(
            task=setting.task,
            optimizer="zero_one_adam",
            overrides={},
            learning_rate=2e-3,
            seed=0,
            steps=setting.steps,
            replicas=setting.replicas,
            size=setting.size,
        )
        self.settings = build_config(described, data).optimizer
        self.rates = [rate for rate in setting.rates if setting.kinds(ALONE, rate) is not None]
        self.link = {rate: setting.measured_bits(rate) / 8 * SEGMENT / FRAME for rate in self.rates}
        self.fitted_to = [rate for rate in self.rates if self._fills(rate)][-FITTED_RATES:]
        self.points = [
            Point(name, rate, kind, seconds)
            for rate in self.rates
            for name in PLANNED
            for kind, (_, seconds) in (setting.kinds(name, rate) or {}).items()
        ]
        self.alone = [kinds["local"][1] for rate in self.rates if (kinds := setting.kinds(ALONE, rate)) is not None]

    def _fills(self, rate: str) -> bool:
        cap = bits_per_second(rate)
        return cap is None or self.link[rate] * 8 * FRAME / SEGMENT > NEARLY_FULL * cap

    def cluster(self, rate: str, machine: Machine) -> Cluster:
        return Cluster(
            nodes=self.setting.replicas,
            processes_per_node=1,
            link_rate=self.link[rate],
            inside_rate=self.link[rate],
            latency=machine.latency,
            inside_latency=machine.latency,
            memory_rate=math.inf,  # AdamW is part of the steps without an exchange, the rest of ``Machine.step``
        )

    def work(self, machine: Machine, *, is_ours: bool) -> Work:
        passes = median(self.alone)
        return Work(
            parameters=self.setting.parameters,
            forward_seconds=passes / 3,
            backward_seconds=passes * 2 / 3,
            step_seconds=machine.step if is_ours else 0.0,
            exchange_seconds=machine.exchange,
            sending=machine.sending,
            ddp_bucket_bytes=DDP_BUCKET_BYTES,
        )

    def optimizer(self, contestant: str) -> OptimizerConfig:
        """The optimizer settings of a contestant."""
        entry = ENTRIES[contestant]
        return dataclasses.replace(self.settings, optimizer=entry.optimizer, **entry.overrides(self.setting.steps))

    def model(self, rate: str, machine: Machine, contestant: str) -> StepModel:
        settings = self.optimizer(contestant)
        work = self.work(machine, is_ours=contestant != BASELINE)
        work = dataclasses.replace(work, gradient_bytes=full_step_bytes(settings, "bf16"))
        return StepModel(self.cluster(rate, machine), work, settings)

    def seconds(self, point: Point, machine: Machine) -> float:
        model = self.model(point.rate, machine, point.contestant)
        return model.step(point.kind, every_step=False).seconds

    def fit(self) -> Machine:
        """The machine with the best fit to the logarithms of the times at the highest rates."""
        points = [point for point in self.points if point.rate in self.fitted_to]
        assert points, "no timed steps"

        def errors(logarithms: np.ndarray) -> list[float]:
            machine = Machine(*np.exp(logarithms))
            return [math.log(self.seconds(point, machine) / point.seconds) for point in points]

        found = least_squares(errors, np.log([1e-4, 1e-9, 1e-3, 1e-3]), bounds=(np.log(1e-12), np.log(1.0)))
        return Machine(*(float(value) for value in np.exp(found.x)))

    def runs(self, rate: str, machine: Machine) -> list[RunTime]:
        """Predicted whole runs of the optimizers among which ``--auto`` chooses."""
        return [
            run_time(
                Choice(name=name, optimizer=self.optimizer(name)),
                cluster=self.cluster(rate, machine),
                work=self.work(machine, is_ours=name != BASELINE),
                train_iters=self.setting.steps,
                precision="bf16",
            )
            for name in PLANNED
        ]


def report(lines: Sequence[Line], data: Path, margins: Sequence[float]) -> str:
    """Markdown report: errors of the model and regrets of its advice."""
    parts = ["# Last results of plan_check.py\n"]
    for setting in settings(lines, margins):
        model = Predictions(setting, data)
        machine = model.fit()
        title = f"{setting.task}, {setting.parameters / 1e6:.2f} M parameters, {setting.replicas} hosts"
        parts += [
            f"## {title}, {setting.steps} steps, {setting.congestion_control}\n",
            f"Fitted to the steps at {' and '.join(model.fitted_to)}: {1e6 * machine.latency:.0f} us a message, "
            f"{1e9 * machine.sending:.2f} ns a byte and {1e3 * machine.exchange:.2f} ms an exchange for the processor, "
            f"{1e3 * machine.step:.2f} ms a step for this library's optimizers.\n",
        ]
        foretold = {rate: _named(recommend(model.runs(rate, machine)).best.choice.optimizer) for rate in model.rates}
        parts += [_errors(model, machine), _regrets(setting, foretold, "With this model")]
        if measured := _advice(lines, setting):
            parts.append(_regrets(setting, measured, "What --auto chose from its own measurements"))
    return "\n".join(parts)


def _errors(model: Predictions, machine: Machine) -> str:
    rows = []
    errors: dict[str, list[float]] = {"fitted": [], "foretold": []}
    for name in PLANNED:
        for kind in ("full", "one_bit", "local"):
            cells = []
            for rate in model.rates:
                points = [p for p in model.points if (p.contestant, p.rate, p.kind) == (name, rate, kind)]
                if not points:
                    cells.append("")
                    continue
                seconds = median(point.seconds for point in points)
                error = model.seconds(points[0], machine) / seconds - 1
                errors["fitted" if rate in model.fitted_to else "foretold"].append(error)
                cells.append(f"{seconds:.3f} ({error:+.0%})")
            if any(cells):
                rows.append([ENTRIES[name].title, kind, *cells])
    text = "Seconds of a step as measured, and how far the model is off:\n\n"
    text += markdown([["contestant", "step", *model.rates], *rows])
    for name, of_name in errors.items():
        if of_name:
            text += (
                f"\n{name}: {median(map(abs, of_name)):.0%} off in the median, {max(of_name, key=abs):+.0%} at worst"
                f" ({len(of_name)} figures)."
            )
    return text + "\n"


def _named(settings: OptimizerConfig) -> str:
    """The name of the contestant with these optimizer settings."""
    if find_optimizer(settings.optimizer).ddp:
        return BASELINE
    return "zero_one_adam_every" if settings.sync_policy == "every" else OURS


def _advice(lines: Sequence[Line], setting: Setting) -> dict[str, str]:
    """By rate, the contestant that ``--auto`` chose on these links; all longest intervals H count as one contestant."""
    found = {}
    for line in lines:
        run = line.get("advice")
        if run is not None and line["congestion_control"] == setting.congestion_control:
            own = (setting.task, setting.replicas, setting.size, setting.steps)
            if (run["task"], run["replicas"], run["size"], run["steps"]) == own:
                found[run["rate"]] = _named(OptimizerConfig(**line["chosen"]))
    return found


def _regrets(setting: Setting, advice: dict[str, str], who: str) -> str:
    """Regret: extra time to each loss of the recommended optimizer over the best candidate."""
    title = f"{who}: seconds to a held-out loss with the recommended, and with the best of the same.\n\n"
    return title + "\n".join(_regrets_at(setting, advice, loss) for loss in setting.losses)


def _regrets_at(setting: Setting, advice: dict[str, str], loss: float) -> str:
    rows, regrets, lost = [], [], 0
    for rate, advised in advice.items():
        seconds = {
            name: taken
            for name in PLANNED
            if name != "one_bit_adam"
            and (times := setting.times(name, rate)) is not None
            and (taken := times.to(loss)) is not None
        }
        if not seconds:
            continue
        best = min(seconds, key=seconds.__getitem__)
        cells = [best, f"{seconds[best]:.1f}"]
        if advised in seconds:
            regrets.append(seconds[advised] / seconds[best] - 1)
            rows.append([rate, advised, f"{seconds[advised]:.1f}", *cells, f"{regrets[-1]:.1%}"])
        else:
            lost += 1
            rows.append([rate, advised, "never", *cells, ""])
    text = markdown([[f"links, {loss:.3f}", "recommended", "s", "best", "s", "regret"], *rows])
    if regrets:
        text += f"\nRegret: {sum(regrets) / len(regrets):.1%} in the mean, {max(regrets):.1%} at worst (goal: 5 %)."
    return text + (f"\nNot reached with the recommended: {lost} of {len(rows)}.\n" if lost else "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--records", type=Path, default=results / "slow_network.jsonl")
    parser.add_argument("--output", type=Path, default=results / "plan.md")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "prepared", help="folder of the prepared text")
    parser.add_argument(
        "--margins", type=float, nargs="+", default=[0.05, 0.1], help="of the losses to be reached above the baseline's"
    )
    parser.add_argument(
        "--size",
        choices=list(SHAPES),
        default="yardstick",
        help="of the model; runs of the others are of optimizers with earlier defaults",
    )
    arguments = parser.parse_args()
    if min(arguments.margins) < 0.0:
        parser.error(f"--margins {min(arguments.margins):g} is below 0, a loss that no run need reach")
    # of runs, and of runs that --auto was asked about
    records = [line for line in read_records(arguments.records) if "run" in line or "advice" in line]
    lines = [line for line in records if (line.get("run") or line["advice"])["size"] == arguments.size]
    if not any(line["run"]["rate"] != NO_HOSTS for line in lines if "run" in line):
        raise SystemExit(f"{arguments.records} holds no runs of size {arguments.size} over links; run slow_network.py")
    text = report(lines, arguments.data, arguments.margins)
    arguments.output.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
