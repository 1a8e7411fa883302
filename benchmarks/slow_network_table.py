"""Markdown tables of the benchmark's records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean, median
from typing import Any

from hosts import CONGESTION_CONTROL, bits_per_second
from rivals.entries import ALONE, BASELINE, ENTRIES
from slow_network_lab import NO_HOSTS, TOLERANCE, Race

from megatron01.utils.formatting import markdown

OURS = ("zero_one_adam_from_2", "zero_one_adam")
DELAYED = ("zero_one_adam_delayed", "one_bit_adam_delayed")
GOALS = {BASELINE: 8.0, "one_bit_adam": 3.0}
"""How many times sooner than these 0/1 Adam is to be; sooner than any other of its kind."""
BUDGETS = (0.1, 0.25, 1.0)
"""Shares of the baseline's whole time, at which losses are compared."""
BEFORE = "bbr"
"""What controlled congestion in the records that do not tell: what the machine preferred. The library's exchange was
another one then, too."""
_CURVE = 10
"""Evaluations of a run without hosts from which on it says when a loss is reached."""
Line = dict[str, Any]
Curve = Sequence[tuple[int, float, float | None, dict[str, int]]]
"""(step, seconds, held-out loss or None, steps so far by kind) at each evaluation."""
Kinds = dict[str, Sequence[float]]
"""Number of steps and mean seconds of a step, by kind."""


def report(lines: Sequence[Line], margins: Sequence[float]) -> str:
    """Tables of all runs; the target losses lie ``margins`` above the baseline's final loss."""
    parts = ["# Last results of slow_network.py\n"]
    for setting in settings(lines, margins):
        parameters, control = setting.parameters / 1e6, setting.congestion_control
        title = f"{setting.task}, {setting.size}: {parameters:.2f} M parameters, {setting.replicas} hosts"
        parts.append(f"## {title}, {setting.steps} steps, {control}\n")
        parts += [*setting.tables(), *_origin(setting.whole + setting.timed)]
    if len(parts) == 1:
        parts.append("No whole run yet.\n")
    return "\n".join(parts)


def settings(lines: Sequence[Line], margins: Sequence[float]) -> list[Setting]:
    """Every task, model, length and kind of links with whole runs, or with losses and timed steps on links.

    With losses alone, those of the baseline must be among them, as all others are compared with it.
    """
    runs = [line for line in lines if "run" in line and line["run"]["rate"] != NO_HOSTS]
    whole = [line for line in runs if line["run"]["evaluations"]]
    without = [line for line in lines if "run" in line and line["run"]["rate"] == NO_HOSTS]
    curves = [line for line in _best(without) if line["run"]["evaluations"] >= _CURVE]
    found = []
    for key in dict.fromkeys(_setting(line) for line in [*curves, *whole]):
        setting = Setting(
            whole=[line for line in whole if _setting(line) == key],
            timed=[line for line in runs if not line["run"]["evaluations"] and _is_of(line, key)],
            profiles={
                line["rate"]: line["profile"]["share"]
                for line in lines
                if (profile := line.get("profile"))
                and (profile["task"], profile["replicas"], profile["size"]) == key[:3]
            },
            margins=margins,
            without_hosts=[line for line in curves if _setting(line) == key],
        )
        if setting.whole or (setting.timed and setting.has_baseline):
            found.append(setting)
    return found


def same_links(line: Line) -> bool:
    """True if a record's links were configured as now, or it had none."""
    return CONGESTION_CONTROL in _setting(line)


def expected_seconds(lines: Iterable[Line], run: Race) -> float | None:
    """Estimated time of a whole run, from timed steps at the same rate; None without any."""
    for line in lines:
        if "run" not in line or line["run"]["evaluations"] or not same_links(line):
            continue
        if _place(line) == (run.contestant, run.rate):
            timed = line["run"]
            if (timed["task"], timed["replicas"], timed["size"]) == (run.task, run.replicas, run.size):
                return float(line["seconds"] / timed["steps"] * run.steps)
    return None


@dataclass
class Times:
    """Loss curves over time of a contestant at a rate, one per seed; measured, or composed from timed steps."""

    curves: list[Curve]
    is_measured: bool

    def to(self, loss: float) -> float | None:
        """Mean seconds to a loss; None if a seed does not reach it."""
        seconds = [seconds_to(curve, loss) for curve in self.curves]
        return None if None in seconds else mean(second for second in seconds if second is not None)

    def loss_at(self, seconds: float) -> float | None:
        losses = [loss_at(curve, seconds) for curve in self.curves]
        return None if None in losses else mean(loss for loss in losses if loss is not None)

    @property
    def origin(self) -> str:
        """Origin of the curves in words: whole or timed runs, and the number of seeds."""
        seeds = f", {len(self.curves)} seeds" if len(self.curves) > 1 else ""
        return ("whole" if self.is_measured else "timed") + seeds

    @property
    def end(self) -> float:
        return mean(curve[-1][1] for curve in self.curves)


class Setting:
    """The runs of one task, model, length and kind of links."""

    def __init__(
        self,
        whole: list[Line],  # runs on hosts
        timed: list[Line],
        profiles: dict[str, float],  # target share of the exchange in the baseline's step, by rate
        margins: Sequence[float],  # of the target losses
        without_hosts: Sequence[Line],  # whole runs of which only the losses count
    ) -> None:
        self.whole = whole
        self.timed = timed
        self.learned = [*whole, *without_hosts]
        self.task, self.replicas, self.size, self.steps, self.congestion_control = _setting(self.learned[0])
        self.parameters: int = self.learned[0]["parameters"]
        self._profiles = profiles
        self.rates = sorted({line["run"]["rate"] for line in whole + timed}, key=_bits)
        known = {line["run"]["contestant"] for line in self.learned}
        self._names = [name for name in ENTRIES if name in known]
        self.has_baseline = BASELINE in known
        baseline = [line["curve"][-1][2] for line in self.learned if line["run"]["contestant"] == BASELINE]
        final = mean(baseline) if baseline and None not in baseline else math.nan
        self.losses = [final + margin for margin in margins]

    def tables(self) -> list[str]:
        parts = ["### Rates\n", self._links()]
        for rate in self.rates:
            if len(self.learned) > len(self.whole) or any(line["run"]["rate"] == rate for line in self.whole):
                parts += [f"### {self._name(rate)}\n", self._race(rate), self._goals(rate)]
        title = f"### How many times sooner than {ENTRIES[BASELINE].title} at a loss of"
        for loss in self.losses:
            parts += [f"{title} {loss:.3f}\n", self._gains(loss)]
        return [*parts, "### Seconds of a step by kind\n", self._steps(), self._checks()]

    def times(self, name: str, rate: str) -> Times | None:
        """Times of whole runs if there are any, else composed from the curve of another rate and timed steps."""
        measured = [line["curve"] for line in self.whole if _place(line) == (name, rate) and line["curve"]]
        if measured:
            return Times(measured, is_measured=True)
        return self._composed(name, rate)

    def _composed(self, name: str, rate: str) -> Times | None:
        kinds = self.kinds(name, rate)
        by_seed = {
            line["run"]["seed"]: line["curve"]
            for line in reversed(self.learned)
            if line["run"]["contestant"] == name and line["curve"]
        }
        if kinds is None or not by_seed:
            return None
        curves = [curve for _, one in sorted(by_seed.items()) if (curve := composed(one, kinds)) is not None]
        return Times(curves, is_measured=False) if len(curves) == len(by_seed) else None

    def kinds(self, name: str, rate: str) -> Kinds | None:
        """Step times by kind, from the latest timed steps."""
        found = [line["kinds"] for line in self.timed if _place(line) == (name, rate)]
        return found[-1] if found else None

    def _share(self, rate: str) -> float | None:
        """Share of the exchange in the baseline's step time."""
        alone, step = self.kinds(ALONE, rate), self.kinds(BASELINE, rate)
        return None if alone is None or step is None else 1 - alone["local"][1] / step["full"][1]

    def _name(self, rate: str) -> str:
        share = self._profiles.get(rate)
        return rate if share is None else f"{rate}, where {BASELINE} was to exchange for {share:.0%} of a step"

    def measured_bits(self, rate: str) -> float:
        """The measured rate of the links at a cap, in bits of frames per second: the median over runs."""
        return float(median(line["link_bits"] for line in self.whole + self.timed if line["run"]["rate"] == rate))

    def _links(self) -> str:
        rows = []
        for rate in self.rates:
            links = [line["link_bits"] for line in self.whole + self.timed if line["run"]["rate"] == rate]
            cap, share = bits_per_second(rate), self._share(rate)
            off = [bits for bits in links if cap is not None and abs(bits / cap - 1) > TOLERANCE]
            ends = " to ".join(f"{bits / 1e6:.4g}" for bits in (min(links), max(links)))
            row = [rate, f"{median(links) / 1e6:.4g}", ends, str(len(links)), str(len(off))]
            rows.append([*row, "" if share is None else f"{share:.1%}"])
        header = ["cap", "measured Mbit/s", "from", "runs", f"off by more than {TOLERANCE:.0%}"]
        return markdown([[*header, f"{BASELINE}: exchange / step"], *rows])

    def _race(self, rate: str) -> str:
        baseline = self.times(BASELINE, rate)
        rows = []
        for name in self._names:
            times = self.times(name, rate)
            if times is None:
                continue
            reached = [times.to(loss) for loss in self.losses]
            budgets = [times.loss_at(share * baseline.end) for share in BUDGETS] if baseline else [None] * len(BUDGETS)
            lines = [line for line in self.whole if _place(line) == (name, rate)]
            cells = [ENTRIES[name].title + ENTRIES[name].limits_of_run(self.steps)]
            cells += [_rate_of(self.learned, name), times.origin]
            cells += ["never" if value is None else f"{value:.1f}" for value in reached]
            cells += ["" if loss is None else f"{loss:.3f}" for loss in (*budgets, times.loss_at(math.inf))]
            rows.append([*cells, f"{times.end:.0f}", *_traffic(lines)])
        header = ["contestant", "lr", "run", *(f"s to {loss:.3f}" for loss in self.losses)]
        header += [
            f"loss after {share * baseline.end:.0f} s" if baseline else f"loss at {share:.0%}" for share in BUDGETS
        ]
        return markdown([[*header, "at the end", "s", "MB by formula", "MB counted", "with headers"], *rows])

    def _goals(self, rate: str) -> str:
        """Speed-up of 0/1 Adam over the contestants with goals, at each target loss."""
        rivals = [*GOALS, *(name for name in self._names if name.startswith("deepspeed_zero_one"))]
        pairs = [*((ours, rivals) for ours in OURS), (DELAYED[0], [*rivals, DELAYED[1]])]
        return "\n".join(line for ours, others in pairs for line in self._comparisons(ours, others, rate))

    def _comparisons(self, ours: str, rivals: Sequence[str], rate: str) -> Iterator[str]:
        """One line per target loss."""
        own = self.times(ours, rate)
        if own is None:
            return
        for loss in self.losses:
            seconds = own.to(loss)
            if seconds is None:
                yield f"{ours} does not reach {loss:.3f}.\n"
                continue
            parts = []
            for name in rivals:
                times = self.times(name, rate)
                if times is None:
                    continue
                other = times.to(loss)
                goal = "" if name in DELAYED else f" (goal: {GOALS.get(name, 1.0):g})"
                said = "which never gets there" if other is None else f"{other / seconds:.2f} times{goal}"
                parts.append(f"{ENTRIES[name].title}: {said}")
            yield f"{ours} reaches {loss:.3f} sooner than {'; '.join(parts)}.\n"

    def _gains(self, loss: float) -> str:
        rows = []
        baseline = {rate: times.to(loss) for rate in self.rates if (times := self.times(BASELINE, rate))}
        for name in self._names:
            gains = {}
            for rate in self.rates:
                times, reference = self.times(name, rate), baseline.get(rate)
                seconds = times.to(loss) if times else None
                if reference is not None and seconds is not None:
                    gains[rate] = reference / seconds
            cells = [f"{gains[rate]:.2f}" if rate in gains else "" for rate in self.rates]
            rows.append([ENTRIES[name].title, *cells, "" if name == BASELINE else self._stops(name, loss, gains)])
        return markdown([["contestant", *self.rates, "pays up to"], *rows])

    def _stops(self, name: str, loss: float, gains: dict[str, float]) -> str:
        if not gains:
            curves = [line["curve"] for line in self.learned if line["run"]["contestant"] == name]
            return "never there" if None in [seconds_to(curve, loss) for curve in curves] else "not timed"
        rates = sorted(gains, key=self.measured_bits)
        where = crossover([self.measured_bits(rate) for rate in rates], [gains[rate] for rate in rates])
        if where is None:
            return "any rate" if rates[-1] == self.rates[-1] else f"{rates[-1]} at least"
        return f"{where / 1e6:.3g} Mbit/s" if where else "no rate"

    def _steps(self) -> str:
        rows = []
        for name in [ALONE, *self._names]:
            cells = []
            for rate in self.rates:
                kinds = self.kinds(name, rate) or {}
                cells.append(", ".join(f"{kind} {seconds:.3f}" for kind, (_, seconds) in sorted(kinds.items())))
            rows.append(["no exchange" if name == ALONE else ENTRIES[name].title, *cells])
        return markdown([["contestant", *self.rates], *rows])

    def _checks(self) -> str:
        """Differences between counted bytes and formulas, and between composed times and those of whole runs."""
        lines = self.whole + self.timed
        traffic = [(line["payload_bytes"] / line["formula_bytes"] - 1, line) for line in lines if line["formula_bytes"]]
        worst, line = max(traffic, key=lambda pair: abs(pair[0]))
        text = (
            f"Bytes by the interfaces' counters, without headers of frames, against the formulas: {worst:+.1%} at "
            f"worst ({line['run']['contestant']} at {line['run']['rate']}). "
            f"Segments sent again: {sum(line['resent'] for line in lines)}."
        )
        errors = []
        for name, rate in product(self._names, self.rates):
            measured, together = self.times(name, rate), self._composed(name, rate)
            if measured is not None and measured.is_measured and together is not None:
                errors.append(together.end / measured.end - 1)
        if errors:
            text += (
                " Times put together from timed steps, against whole runs at the same rate: "
                f"{median(errors):+.1%} (median), {max(errors, key=abs):+.1%} at worst."
            )
        return text + "\n"


def seconds_to(curve: Curve, loss: float) -> float | None:
    """Time at which ``loss`` is first reached, interpolated linearly between evaluations; None if it never is."""
    before: tuple[float, float] | None = None
    for _, seconds, value, _ in curve:
        if value is None:
            return None
        if value <= loss:
            if before is None:
                return seconds
            start, higher = before
            return start + (seconds - start) * (higher - loss) / (higher - value)
        before = seconds, value
    return None


def loss_at(curve: Curve, seconds: float) -> float | None:
    """The loss of the last evaluation up to a time; None before the first."""
    values = [value for _, when, value, _ in curve if when <= seconds]
    return values[-1] if values else None


def composed(curve: Curve, kinds: Kinds) -> Curve | None:
    """The curve with seconds composed from the step times in ``kinds``; None if a kind is missing.

    The loss after a step does not depend on the link rate. A kind joined by + takes the sum of its parts, if it has no
    time of its own.
    """
    seconds = {kind: value for kind, (_, value) in kinds.items()}
    for kind in {kind for *_, counts in curve for kind in counts}:
        parts = kind.split("+")
        if any(part not in kinds for part in parts) and kind not in kinds:
            return None
        seconds.setdefault(kind, sum(seconds[part] for part in parts if part in seconds))
    return [
        (step, sum(count * seconds[kind] for kind, count in counts.items()), loss, counts)
        for step, _, loss, counts in curve
    ]


def crossover(rates: Sequence[float], gains: Sequence[float]) -> float | None:
    """The link rate above which a method stops paying off: its gain falls below 1.

    None if it pays off at the highest rate, 0 if at none. Between two rates (bits per second, ascending), the gain (how
    many times sooner than the baseline the loss is reached) is interpolated linearly in the logarithms of both.
    """
    assert len(rates) == len(gains) > 0
    if gains[-1] >= 1:
        return None
    paying = [index for index, gain in enumerate(gains) if gain >= 1]
    if not paying:
        return 0.0
    low, high = paying[-1], paying[-1] + 1
    share = math.log(gains[low]) / math.log(gains[low] / gains[high])
    return float(rates[low] * (rates[high] / rates[low]) ** share)


def _setting(line: Line) -> tuple[Any, ...]:
    """Key of a line's setting; runs without hosts belong to the present kind of links."""
    run = line["run"]
    control = CONGESTION_CONTROL if run["rate"] == NO_HOSTS else line.get("congestion_control", BEFORE)
    return (*(run[key] for key in ("task", "replicas", "size", "steps")), control)


def _is_of(line: Line, setting: tuple[Any, ...]) -> bool:
    """True if timed steps, of any number, belong to a setting."""
    own = _setting(line)
    return own[:3] == setting[:3] and own[4] == setting[4]


def _best(lines: Sequence[Line]) -> list[Line]:
    """The runs at each contestant's best learning rate, by the loss of the first seed."""
    found: dict[tuple[Any, ...], tuple[float, float]] = {}
    for line in lines:
        run = line["run"]
        if run["seed"] == 0 and line["curve"] and line["curve"][-1][0] == run["steps"]:
            loss = line["curve"][-1][2]
            key = (*_setting(line), run["contestant"])
            found[key] = min(
                found.get(key, (math.inf, 0.0)), (math.inf if loss is None else loss, run["learning_rate"])
            )
    return [
        line
        for line in lines
        if found.get((*_setting(line), line["run"]["contestant"]), (0.0, 0.0))[1] == line["run"]["learning_rate"]
    ]


def _place(line: Line) -> tuple[str, str]:
    return line["run"]["contestant"], line["run"]["rate"]


def _bits(rate: str) -> float:
    bits = bits_per_second(rate)
    return math.inf if bits is None else bits


def _rate_of(lines: Iterable[Line], name: str) -> str:
    rates = {line["run"]["learning_rate"] for line in lines if line["run"]["contestant"] == name}
    return ", ".join(f"{rate:.3g}" for rate in sorted(rates))


def _traffic(lines: Sequence[Line]) -> list[str]:
    """MB sent by one host: by formula, and counted without and with headers."""
    if not lines:
        return ["", "", ""]
    names = ("formula_bytes", "payload_bytes", "frame_bytes")
    formula, payload, frames = (mean(line[name] for line in lines) for name in names)
    return [f"{formula / 1e6:.2f}", f"{payload / 1e6:.2f} ({payload / formula - 1:+.1%})", f"{frames / 1e6:.2f}"]


def _origin(lines: Sequence[Line]) -> list[str]:
    """Machine, commit and date of the runs."""
    if not lines:
        return []
    machines, revisions = (", ".join(sorted({line[key] for line in lines})) for key in ("machine", "revision"))
    load = median(line["load"] for line in lines)
    return [f"Runs: {len(lines)}. {machines}. Load of the machine: {load:.1f} (median). Revisions: {revisions}.\n"]
