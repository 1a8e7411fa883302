"""Time to a held-out loss on slow links: this library's optimizers beside other data-parallel methods.

    python benchmarks/slow_network.py --tune          # learning rates, without hosts; once
    python benchmarks/slow_network.py --losses --seeds 0 1 2      # what is learned, without hosts
    python benchmarks/slow_network.py                 # needs root
    python benchmarks/slow_network.py --advise        # what --auto chooses; needs root
    python benchmarks/slow_network.py --table         # of what was run so far

Every run is appended to a file of JSON lines. An interrupted command continues with the missing runs when it is started
again. README.md explains the method and the columns.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from convergence_run import SHAPES, small_vocabulary
from hosts import bits_per_second, why_not
from records import Records, read_records
from replica_pool import ReplicaFailed
from reporting import ROOT, at_least, machine, revision, run_program
from rivals.entries import ALONE, BASELINE, ENTRIES
from slow_network_lab import NO_HOSTS, Lab, Race, find_profile
from slow_network_table import OURS, expected_seconds, report, same_links

GRID = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
"""First learning rates where a sweep goes by doublings."""
ROOT_TWO_GRID = (5e-4, 7.1e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3, 5.7e-3, 8e-3, 1.1e-2)
SEED = 0
"""With which learning rates are tuned, and steps timed."""
ANY_RATE = 2e-3
"""Where only times are of interest."""


def main() -> None:
    arguments = parse_arguments()
    if not arguments.table:
        names = available(arguments.contestants)
        if arguments.on_hosts and (missing := why_not()) is not None:
            raise SystemExit(f"slow hosts are network namespaces, which need root and iproute2, but {missing}")
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that hosts are removed at exit
        prepare = [sys.executable, str(ROOT / "data" / "prepare.py"), "--output", str(arguments.data)]
        subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
        measure(arguments, names)
    text = report(read_records(arguments.output), arguments.margins)
    arguments.output.with_suffix(".md").write_text(text)
    print(text, end="")


def available(names: Sequence[str]) -> list[str]:
    """The baseline and the contestants that can be built here; prints those that cannot."""
    wanted = dict.fromkeys([BASELINE, *names])
    for name in wanted:
        if not ENTRIES[name].is_available():
            print(f"{name} is left out: {ENTRIES[name].needs} is not installed", flush=True)
    return [name for name in wanted if ENTRIES[name].is_available()]


def measure(arguments: argparse.Namespace, names: list[str]) -> None:
    """Do all runs that are missing from the file. Raises SystemExit if some fail, or a learning rate is not tuned."""
    records = Records(arguments.output, {"revision": revision(), "machine": f"{machine()}, {datetime.date.today()}"})
    sweep = Sweep(records, arguments, names)
    for task in arguments.task:
        if not (arguments.tune or arguments.advise):
            sweep.learning_rates(task)  # fail early
        if arguments.size == "yardstick":
            small_vocabulary(task, arguments.data)  # before several hosts would create it at the same time
        warm_up = [sweep.race(task, name, ANY_RATE) for name in [ALONE, *names]]
        with Lab(arguments.hosts, arguments.data, warm_up, hosts=arguments.on_hosts) as lab:
            if arguments.tune:
                sweep.tune(lab, task)
            elif arguments.losses:
                sweep.learn(lab, task)
            elif arguments.advise:
                sweep.advise(lab, task)
            else:
                sweep.compete(lab, task)
    if sweep.failures:
        raise SystemExit(f"failed: {', '.join(sweep.failures)}; the same command tries them again")


class Sweep:
    """The runs of a command, and those of earlier ones in the same file."""

    def __init__(self, records: Records, arguments: argparse.Namespace, names: list[str]) -> None:
        self.failures: list[str] = []
        self._records = records
        self._arguments = arguments
        self._names = names

    def tune(self, lab: Any, task: str) -> None:
        """Run learning rates with seed 0 until each contestant's best is known."""
        for name in self._names:
            while rates := self._tuning(task).missing(name):
                if not all([self._result(lab, self.race(task, name, rate)) for rate in rates]):
                    break

    def learn(self, lab: Any, task: str) -> None:
        """Whole runs without hosts with every seed, for the losses; their times are composed from timed steps."""
        learning_rates = self.learning_rates(task)
        for seed in self._arguments.seeds:
            for name in self._names:
                self._result(lab, self.race(task, name, learning_rates[name], seed=seed))

    def compete(self, lab: Any, task: str) -> None:
        """Timed steps of every contestant at every rate, then whole runs at the rates of the profiles and --whole."""
        arguments = self._arguments
        learning_rates = self.learning_rates(task)
        profiles = [self._profile(lab, task, share) for share in arguments.find_profile]
        whole = list(dict.fromkeys([*profiles, *arguments.whole]))
        rates = list(dict.fromkeys([*whole, *arguments.rates]))
        timed = {"steps": min(arguments.timed_steps, arguments.steps), "seed": SEED, "evaluations": 0}
        for rate, name in interleaved(rates, [ALONE, *self._names]):
            self._result(lab, self.race(task, name, learning_rates.get(name, ANY_RATE), rate=rate, **timed))
        for seed in arguments.seeds:
            for rate, name in interleaved(whole, self._names):
                run = self.race(task, name, learning_rates[name], rate=rate, seed=seed)
                expected = expected_seconds(self._records.lines, run)
                if expected is not None and expected > arguments.longest:
                    self._say(run, f"would take {expected:.0f} s and is only timed")
                else:
                    self._result(lab, run)

    def advise(self, lab: Any, task: str) -> None:
        """Record what ``--auto`` chooses at every rate."""
        for rate in self._arguments.rates:
            run = self.race(task, OURS[0], ANY_RATE, rate=rate, evaluations=0)
            description = dataclasses.asdict(run)
            if self._records.find("advice", description) is None:
                line = self._records.add({"advice": description, **lab.advise(run)})
                self._say(run, line["reason"])

    def learning_rates(self, task: str) -> dict[str, float]:
        """Learning rate of each contestant. Raises SystemExit if one has not been tuned."""
        if self._arguments.learning_rate is not None:
            return dict.fromkeys(self._names, self._arguments.learning_rate)
        tuning = self._tuning(task)
        best = {name: tuning.best(name) for name in self._names}
        if untuned := [name for name, rate in best.items() if rate is None]:
            raise SystemExit(
                f"no learning rate for {', '.join(untuned)} ({task}, {self._tuned_steps} steps): run with --tune "
                "first, or give --learning-rate, or --tuned-steps for those of runs of another length"
            )
        return {name: rate for name, rate in best.items() if rate is not None}

    def race(self, task: str, name: str, learning_rate: float, **changes: Any) -> Race:
        """A run with the settings of the command line, except for ``changes``."""
        arguments = self._arguments
        settings: dict[str, Any] = {
            "seed": SEED,
            "steps": self._tuned_steps if arguments.tune else arguments.steps,
            "replicas": arguments.hosts,
            "size": arguments.size,
            "rate": NO_HOSTS,
            "evaluations": arguments.evaluations,
        }
        return Race(task=task, contestant=name, learning_rate=learning_rate, **settings | changes)

    @property
    def _tuned_steps(self) -> int:
        return int(self._arguments.tuned_steps or self._arguments.steps)

    def _tuning(self, task: str) -> Tuning:
        arguments = self._arguments
        setting = {"task": task, "steps": self._tuned_steps, "replicas": arguments.hosts, "size": arguments.size}
        return Tuning(self._records.lines, read_records(arguments.convergence), setting)

    def _profile(self, lab: Any, task: str, share: float) -> str:
        """The rate at which the baseline exchanges for this share of a step."""
        arguments = self._arguments
        profile = {"task": task, "share": share, "replicas": arguments.hosts, "size": arguments.size}
        line = self._records.find("profile", profile)
        if line is None:
            rate, measured = find_profile(lab, self.race(task, BASELINE, ANY_RATE), share)
            line = self._records.add({"profile": profile, "rate": rate, "measured_share": measured})
            print(f"{task}  {BASELINE} exchanges for {measured:.1%} of a step at {rate}", flush=True)
        return str(line["rate"])

    def _result(self, lab: Any, run: Race) -> bool:
        """Measure a run unless the file holds it; True if it holds it then."""
        description = dataclasses.asdict(run)
        if any(line.get("run") == description and same_links(line) for line in self._records.lines):
            return True
        try:
            line = self._records.add({"run": description, **lab.measure(run)})
        except ReplicaFailed as error:
            print(error, file=sys.stderr, flush=True)
            self.failures.append(f"{run.contestant} at {run.rate}")
            return False
        if run.evaluations:
            loss = line["curve"][-1][2] if line["curve"] else None
            self._say(run, f"loss {math.nan if loss is None else loss:.4f}  {line['seconds']:.1f} s")
        else:
            self._say(run, f"{line['seconds'] / run.steps:.3f} s a step, link {line['link_bits'] / 1e6:.4g} Mbit/s")
        return True

    @staticmethod
    def _say(run: Race, text: str) -> None:
        where = f"lr {run.learning_rate:.3g}" if run.rate == NO_HOSTS else run.rate
        print(f"{run.task}  {where}  seed {run.seed}  {run.contestant}  {text}", flush=True)


class Tuning:
    """The learning rate of each contestant: the best of a grid with seed 0, by the held-out loss at the end.

    The middle of the grid is tried first, then the neighbours of the best so far, until both neighbours of the best are
    worse, or the best is at an end of the grid.

    Args:
        lines: of this benchmark's own file.
        convergence: lines of the file of ``convergence.py``, from which runs of the same optimizer are taken, whatever
            the type in which their gradients were sent in full steps.
        setting: task, steps, replicas and size that the runs must have.
    """

    def __init__(self, lines: list[dict[str, Any]], convergence: list[dict[str, Any]], setting: dict[str, Any]) -> None:
        own = [line for line in lines if "run" in line and line["run"]["rate"] == NO_HOSTS]
        self._own = [line for line in own if self._fits(line["run"], setting)]
        flat = [line for line in convergence if "nodes" not in line["run"]]  # flat, like the exchange between the hosts
        self._convergence = [line for line in flat if self._fits(line["run"], setting)]
        self._steps = setting["steps"]
        self.rates = ROOT_TWO_GRID if setting["size"] == "yardstick" else GRID

    @staticmethod
    def _fits(run: dict[str, Any], setting: dict[str, Any]) -> bool:
        return run["seed"] == SEED and all(run[name] == value for name, value in setting.items())

    def losses(self, contestant: str) -> dict[float, float]:
        """Known losses by learning rate; infinite where training diverged."""
        chosen = ENTRIES[contestant]
        found: dict[float, float | None] = {}
        if not chosen.tuned_here:
            wanted = (chosen.optimizer, _without_wire(chosen.overrides(self._steps)))
            for line in self._convergence:
                run = line["run"]
                if (run["optimizer"], _without_wire(run["overrides"])) == wanted:
                    found[run["learning_rate"]] = line["held_out_loss"]
        for line in self._own:
            if line["run"]["contestant"] == contestant:
                finished = line["curve"] and line["curve"][-1][0] == self._steps
                found[line["run"]["learning_rate"]] = line["curve"][-1][2] if finished else None
        return {rate: math.inf if found[rate] is None else found[rate] for rate in self.rates if rate in found}  # type: ignore[misc]

    def missing(self, contestant: str) -> list[float]:
        """Learning rates to try next; their results may call for more."""
        losses = self.losses(contestant)
        if not losses:
            return [self.rates[len(self.rates) // 2]]
        best = self.rates.index(min(losses, key=losses.__getitem__))
        return [rate for rate in self.rates[max(0, best - 1) : best + 2] if rate not in losses]

    def best(self, contestant: str) -> float | None:
        """The best learning rate; None before its neighbours have been tried."""
        losses = self.losses(contestant)
        return min(losses, key=losses.__getitem__) if losses and not self.missing(contestant) else None


def _without_wire(overrides: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in overrides.items() if name != "gradient_wire_dtype"}


def interleaved(rates: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every contestant at every rate, ordered so that consecutive runs differ in both and drift affects all alike."""
    for turn in range(len(rates)):
        for index, name in enumerate(names):
            yield rates[(index + turn) % len(rates)], name


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to a held-out loss on slow links, of many ways of training.")
    parser.add_argument("--task", choices=("gpt2", "bert"), nargs="+", default=["gpt2"])
    names = list(ENTRIES)
    parser.add_argument("--contestants", choices=names, nargs="+", default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--rates",
        type=_rate,
        nargs="*",
        default=["50mbit", "200mbit", "1gbit", "unlimited"],
        help="of the links; here, runs are put together from timed steps",
    )
    parser.add_argument(
        "--find-profile",
        type=_share,
        nargs="*",
        default=[0.75, 0.94],
        metavar="SHARE",
        help="also the rates at which the baseline exchanges for these shares of a step; here, runs are whole",
    )
    parser.add_argument("--whole", type=_rate, nargs="*", default=[], metavar="RATE", help="whole runs here too")
    parser.add_argument("--longest", type=float, default=600.0, help="seconds; what would take more is only timed")
    parser.add_argument("--timed-steps", type=at_least(2), default=32, help="of a timed run")
    parser.add_argument("--steps", type=int, default=400, help="of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--hosts", type=int, choices=range(2, 9), default=4, metavar="2..8")
    parser.add_argument("--size", choices=list(SHAPES), default="small", help="of the model")
    parser.add_argument(
        "--evaluations", type=at_least(1), default=20, help="in a run; the clock stands still meanwhile"
    )
    parser.add_argument("--tune", action="store_true", help="find learning rates, without hosts")
    parser.add_argument("--losses", action="store_true", help="only whole runs without hosts, for what they learn")
    parser.add_argument("--advise", action="store_true", help="only what --auto chooses at the rates")
    parser.add_argument("--tuned-steps", type=int, help="length of the runs that learning rates are from, if another")
    parser.add_argument("--learning-rate", type=float, help="the same for everybody, to try things out")
    parser.add_argument(
        "--margins",
        type=float,
        nargs="+",
        default=[0.05, 0.1, 0.2],
        help="the losses to be reached lie so far above the baseline's at the end",
    )
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--convergence", type=Path, default=results / "study_sweep.jsonl", help="tuned there")
    parser.add_argument("--output", type=Path, default=results / "slow_network.jsonl")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "prepared", help="folder of the prepared text")
    parser.add_argument("--table", action="store_true", help="only make the tables of what was run")
    arguments = parser.parse_args(words)
    arguments.on_hosts = not (arguments.tune or arguments.losses)
    return arguments


def _rate(text: str) -> str:
    try:
        bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text} is no share; expected a number between 0 and 1")
    return share


if __name__ == "__main__":
    run_program(main)
