"""From the records of the study to docs/study.md and its figures; every number and finding comes from a record."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from convergence_run import Run as RunDescription
from convergence_run import build_config
from convergence_table import collect, sweep

from megatron01.compare import charts
from megatron01.compare.command import CompareConfig, compare_runs, file_name, write
from megatron01.compare.page import Part
from megatron01.compare.runs import Run, run_of_lines
from megatron01.compare.summary import Row, Summary, table
from megatron01.utils.formatting import format_bytes, format_count, format_duration

SIGNIFICANT = 0.05
NOTABLE = 0.01
LINKS = {"10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8, "10 Mbit/s": 1e7}
TASKS = {"gpt2": "GPT-2", "bert": "BERT"}
FIGURES = (
    "Sample-wise convergence",
    "Time-wise convergence",
    "Convergence by bytes sent",
    "Throughput",
    "Volume",
    "Rounds",
)
FOLDER = "study"

Record = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """The part of the records about one task and length of run.

    Attributes:
        records: of the study, all rates and seeds.
        swept: of sweeps made before.
        part: the runs at each optimizer's best rate, compared.
    """

    task: str
    records: list[Record]
    swept: list[Record]
    part: Part


def write_report(records: list[Record], swept: list[Record], docs: Path) -> list[Path]:
    """Write ``study.md`` into ``docs``, and the figures and the page of the comparison into ``docs/study``."""
    folder = docs / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    studies = [_study(task, records, swept) for task in TASKS if any(r["run"]["task"] == task for r in records)]
    written = []
    for study in studies:
        for panel in _panels(study.part):
            written.append(folder / f"{study.task}_{file_name(panel.title)}.svg")
            charts.save(panel.charts, written[-1], title=f"{panel.title}: {TASKS[study.task]}")
    config = CompareConfig(output=folder, title="The example study", png=False)
    written += write([study.part for study in studies], config, [])
    path = docs / "study.md"
    path.write_text(_page(studies))
    return [path, *written]


def _study(task: str, records: list[Record], swept: list[Record]) -> Study:
    own = [record for record in records if record["run"]["task"] == task]
    setups = [_setup(record) for record in own]
    setup = max(set(setups), key=setups.count)
    own = [record for record in own if _setup(record) == setup]
    names = {_variant(record): record["name"] for record in own}
    before = [
        {**record, "name": names[_variant(record)]}
        for record in swept
        if record["run"]["task"] == task and _setup(record) == setup and _variant(record) in names
    ]
    runs = [run for chosen in _at_the_best_rate(own) for run in map(_run, chosen)]
    return Study(task, own, before, compare_runs(runs, CompareConfig())[0])


def _setup(record: Record) -> tuple[Any, ...]:
    return tuple(record["run"][key] for key in ("steps", "replicas", "size"))


def _variant(record: Record) -> str:
    return json.dumps([record["run"]["optimizer"], record["run"]["overrides"]], sort_keys=True)


def _at_the_best_rate(records: list[Record]) -> list[list[Record]]:
    """For each variant, the runs of the rate with the most seeds, and of those the lowest mean loss."""
    by_variant: defaultdict[str, defaultdict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        by_variant[_variant(record)][record["run"]["learning_rate"]].append(record)

    def rank(chosen: list[Record]) -> tuple[int, float]:
        losses = [record["held_out_loss"] for record in chosen]
        return -len(chosen), math.inf if None in losses else fmean(losses)

    return [min(by_rate.values(), key=rank) for by_rate in by_variant.values()]


def _run(record: Record) -> Run:
    description = RunDescription(**record["run"])
    config = build_config(description, Path())
    settings = {
        f"{section.name}.{name}": str(value)
        for section in fields(config)
        for name, value in vars(getattr(config, section.name)).items()
    }
    name = f"{record['name']}, seed {description.seed}"
    return run_of_lines(name, record["metrics"], settings, {"world_size": description.replicas})


def _panels(part: Part) -> list[charts.Panel]:
    return [panel for panel in part.panels if panel.title in FIGURES]


def _page(studies: list[Study]) -> str:
    records = [record for study in studies for record in study.records]
    revisions = ", ".join(sorted({record["revision"] for record in records}))
    steps, replicas, size = _setup(records[0])
    parts = [
        "# Example study: Adam, 1-bit Adam, 0/1 Adam and BinSGDM",
        f"<!-- Written by benchmarks/study.py from benchmarks/results/study.jsonl. Revisions: {revisions}. -->",
        f"A small BERT and a small GPT-2 are pretrained on the shipped text with every optimizer: {steps} steps on "
        f"{replicas} replicas, which are processes of one machine. `python benchmarks/study.py` makes the runs and "
        "writes this page, its figures and its findings from their records alone; the same charts with their numbers "
        f"as tables are on [one page]({FOLDER}/index.html) that `megatron01 compare` draws.",
        _tuning(studies, size),
        *(_section(study) for study in studies),
        _where_it_did_not_help(studies),
        _cost(studies),
        "## Your own\n\n"
        "`megatron01 compare RUN ...` draws the same from the folders of your runs; [dashboards.md](dashboards.md) "
        "tells how.",
    ]
    return "\n\n".join(parts) + "\n"


def _tuning(studies: list[Study], size: str) -> str:
    rates = sorted({r["run"]["learning_rate"] for study in studies for r in (*study.records, *study.swept)})
    seeds = sorted({r["run"]["seed"] for study in studies for r in study.records})
    earlier = sum(len(study.swept) for study in studies)
    revisions = ", ".join(sorted({r["revision"] for study in studies for r in study.swept}))
    taken = f" {earlier} runs of that sweep were made before, by `benchmarks/convergence.py` at {revisions}."
    return (
        "## What was tuned\n\n"
        f"The learning rate, for each optimizer alike: three rates with seed {seeds[0]}, then twice or half the best "
        f"as long as it was the highest or the lowest tried (in all between {rates[0]:g} and {rates[-1]:g}). The best "
        f"was run with seeds {', '.join(map(str, seeds))}.{taken if earlier else ''} All else is the recipe's ({size} "
        "models, linear warm-up over a tenth of the steps, cosine to 0) and was not tuned for any of them; 1-bit Adam "
        "is frozen at 15 % of the steps, as in its published experiments. Tuning by the held-out loss of one seed "
        "favours nobody, but flatters all a little."
    )


def _section(study: Study) -> str:
    summary, part = study.part.summary, study.part
    first = study.records[0]
    size = f"{format_count(first['parameters'])} parameters, {format_count(first['tokens'])} tokens"
    header, *rows = table(summary)
    results = collect([*study.records, *_not_repeated(study)])
    figures = "\n\n".join(
        f"![{panel.title}, {TASKS[study.task]}]({FOLDER}/{study.task}_{file_name(panel.title)}.svg)\n\n{panel.text}"
        for panel in _panels(part)
    )
    target = f"{summary.target:.4f}" if summary.target is not None else "unknown"
    return "\n\n".join(
        [
            f"## {TASKS[study.task]}: {size}",
            f"Speed-ups are to the held-out loss that all reach ({target}), relative to "
            f"{summary.rows[summary.baseline].group.label}; losses are means over seeds, ± one standard deviation; "
            "gaps ± their standard error.",
            _markdown(header, rows),
            "\n".join(f"* {finding}" for finding in _findings(summary)),
            "Held-out loss with the first seed, by learning rate:",
            sweep(results).rstrip(),
            _links(summary),
            figures,
        ]
    )


def _not_repeated(study: Study) -> list[Record]:
    """Records of earlier sweeps whose run the study has not made again."""
    own = [record["run"] for record in study.records]
    return [record for record in study.swept if record["run"] not in own]


def _findings(summary: Summary) -> list[str]:
    base = summary.rows[summary.baseline]
    found = []
    for row in summary.rows:
        if row is base:
            continue
        sentences = [_about_loss(row, base)]
        if row.bits and base.bits:
            sentences.append(f"It sent {base.bits / row.bits:.1f} times less than {base.group.label}")
            sentences[-1] += f" in {row.rounds:,.0f} exchanges against {base.rounds:,.0f}."
        if row.speed_up is not None:
            times = (
                f"{row.speed_up:.2f} times as fast as"
                if row.speed_up >= 1
                else f"{1 / row.speed_up:.2f} times as slow as"
            )
            sentences.append(f"To the common loss it was {times} {base.group.label} on this machine.")
        found.append(f"**{row.group.label}** " + " ".join(sentences))
    return found


def _about_loss(row: Row, base: Row) -> str:
    if row.gap is None:
        return "diverged with one seed at least."
    p, side = row.gap.p, "above" if row.gap.value > 0 else "below"
    if math.isnan(p):
        certainty = "; one seed says little"
    elif p < SIGNIFICANT:
        certainty = f", which is beyond the spread of the seeds (p = {p:.2g})"
    else:
        certainty = f", which these seeds do not tell from nothing (p = {p:.2g})"
    return f"ends {abs(row.gap.value):.4f} {side} {base.group.label}{certainty}."


def _links(summary: Summary) -> str:
    """What slow links would make of it: measured time plus the bytes over the link, which is computed."""
    rows = []
    for row in summary.rows:
        if row.seconds_to_target is None or row.bytes_to_target is None:
            continue
        times = [row.seconds_to_target + 8 * row.bytes_to_target / rate for rate in LINKS.values()]
        rows.append([row.group.label, format_duration(row.seconds_to_target), *map(format_duration, times)])
    text = (
        "Time to the common loss, measured here, and computed for replicas on links of their own, with what was sent "
        "added at the full rate of the link (no latency, no overlap):"
    )
    return text + "\n\n" + _markdown(["optimizer", "measured", *LINKS], rows)


def _where_it_did_not_help(studies: list[Study]) -> str:
    lines = []
    for study in studies:
        summary = study.part.summary
        base = summary.rows[summary.baseline]
        for row in summary.rows:
            if row is base:
                continue
            name = f"{TASKS[study.task]}, {row.group.label}"
            if row.gap is None:
                lines.append(f"{name}: diverged.")
            elif row.gap.value > 0 and row.gap.p < SIGNIFICANT:
                lines.append(
                    f"{name}: the loss is {row.gap.value:.4f} higher than {base.group.label}'s (p = {row.gap.p:.2g})."
                )
            if row.speed_up is not None and row.speed_up < 1:
                lines.append(
                    f"{name}: later at the common loss than {base.group.label} on one machine ({row.speed_up:.2f}x)."
                )
            faster = (row.tokens_per_second or 0) / (base.tokens_per_second or math.inf)
            if 0 < faster < 1 - NOTABLE:
                lines.append(
                    f"{name}: {1 - faster:.0%} fewer tokens per second than {base.group.label} on one machine."
                )
            if row.bits and base.bits and row.bits >= base.bits:
                lines.append(f"{name}: sends no less than {base.group.label}.")
    listed = "\n".join(f"* {line}" for line in lines) or "* None of these runs shows it."
    return (
        "## Where compression did not help\n\n"
        "Replicas on one machine send through its memory, so that sending less saves nothing there, and packing bits "
        "costs arithmetic. In runs this short the second moment is refreshed at many of the steps, so that 0/1 Adam "
        "sends more full gradients than in a long run (`megatron01 schedule` tells how many). In these runs:\n\n"
        + listed
    )


def _cost(studies: list[Study]) -> str:
    rows = []
    for study in studies:
        by_name: defaultdict[str, list[Record]] = defaultdict(list)
        for record in study.records:
            by_name[record["name"]].append(record)
        for name, records in by_name.items():
            rows.append([f"{TASKS[study.task]}, {name}", *_sums(records)])
    rows.append(["all", *_sums([record for study in studies for record in study.records])])
    header = ["", "runs", "wall-clock", "CPU time", "sent by one replica", "tokens"]
    return (
        "## What it cost\n\nThe runs of the study, tuning included; bytes are those handed to the collectives.\n\n"
        + _markdown(header, rows)
    )


def _sums(records: list[Record]) -> list[str]:
    def total(key: str) -> float:
        return sum(record[key] for record in records)

    return [
        str(len(records)),
        format_duration(total("seconds")),
        format_duration(total("cpu_seconds")),
        format_bytes(total("bytes_sent")),
        format_count(total("tokens")),
    ]


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    """First column to the left and all others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
