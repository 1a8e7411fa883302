"""The study of docs/study.md and the picture of the README, from committed records of ``pretrain_and_finetune.py``.

    python benchmarks/study.py                                            # results/pretrain_and_finetune.jsonl
    python benchmarks/study.py --records runs/evidence/records.jsonl --docs runs/evidence/docs
    python benchmarks/study.py --runs runs/study      # the runs as folders, for ``megatron01 compare`` and wandb

Every number and sentence comes from the records. Writes DOCS/study.md; figures and the page of ``megatron01 compare``
in DOCS/study; and loss against bytes and against time, light and dark, in DOCS/pictures.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, mean, median, stdev
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import yaml
from reporting import ROOT, run_program
from scipy import stats
from study_records import KINDS, Evidence, Record

from megatron01.compare import charts
from megatron01.compare.command import compare_runs, file_name, write
from megatron01.compare.conclusions import answers
from megatron01.compare.page import Part
from megatron01.compare.runs import run_of_lines
from megatron01.config.commands import CompareConfig
from megatron01.config.registry import find_optimizer
from megatron01.utils.files import writing
from megatron01.utils.formatting import format_bytes, format_count, format_duration, markdown

LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
SLOW_LINK = "100 Mbit/s"
SIGNIFICANT = 0.05
FIGURES = ("Sample-wise convergence", "Convergence by bytes sent", "Volume", "Rounds")
COLOURS = ("#7f7f7f", "#1f9e89", "#e0569c", "#d08c29", "#5b7fd6")
THEMES = {"light": ("#24292f", "#d0d7de"), "dark": ("#e6edf3", "#444c56")}
"""Colours of text and of grid lines; the background is the page's."""


def table(evidence: Evidence) -> str:
    """The comparison as Markdown, made from the available records, with a list of what is missing."""
    parts = []
    for kind, title in KINDS.items():
        if evidence.of_chosen(kind):
            parts += [f"## {title}\n", of_training(evidence, kind), *of_use(evidence, kind)]
    runs = dict.fromkeys(run for kind in KINDS for run, _ in evidence.runs(kind))
    missing = [str(run) for run in runs if run not in evidence.records]
    if evidence.spec.glue is not None:
        scored = {task for record in evidence.records.values() for task in record.get("glue", ())}
        missing += [f"GLUE, {task}" for task in evidence.spec.glue["tasks"] if task not in scored]
    return "\n".join([*parts, *_notes(evidence), *([f"Missing: {'; '.join(missing)}."] if missing else [])]) + "\n"


def _notes(evidence: Evidence) -> list[str]:
    every = evidence.records.values()
    diverged = [str(run) for run, record in evidence.records.items() if record["score"] is None]
    named = f" ({'; '.join(diverged)})" if diverged else ""
    made = [", ".join(sorted({record[key] for record in every})) for key in ("revision", "machine", "date")]
    notes = [f"Runs: {len(every)}, of which {len(diverged)} diverged{named}. " + "; ".join(made) + "."]
    if len({record["revision"] for record in every}) > 1:
        notes.append("**These runs are of different commits.**")
    return notes


def of_training(evidence: Evidence, kind: str) -> str:
    """Table of losses and traffic of training: one row for each learning rate that all seeds were run with."""
    best, records = evidence.best_rate(kind, evidence.baseline), evidence.of_chosen(kind)
    baseline = records.get(evidence.baseline, {}).get(best or 0.0, {})
    score = "wrong, %" if kind == "digits" else "held-out loss"
    factor, digits = (100, 2) if kind == "digits" else (1, 4)
    head = ["optimizer", "rate", "seeds", score, f"gap to {evidence.baseline}'s best rate", "MB sent", "bits", "rounds"]
    rows = []
    for optimizer, by_rate in records.items():
        tried = {run.rate for run in evidence.records if (run.kind, run.optimizer) == (kind, optimizer)}
        for rate, by_seed in sorted(by_rate.items()):
            values = [factor * record["score"] for record in by_seed.values()]
            one = next(iter(by_seed.values()))
            gap = [factor * (by_seed[seed]["score"] - baseline[seed]["score"]) for seed in by_seed if seed in baseline]
            own = ""
            if rate == evidence.best_rate(kind, optimizer) and len(tried) > 1:
                end = {min(tried): ", the lowest tried", max(tried): ", the highest tried"}.get(rate, "")
                own = f" (its best{end})"
            cells = [optimizer, f"{rate:g}{own}", str(len(values)), spread(values, digits)]
            cells += ["" if by_seed is baseline else difference(gap, digits), f"{one['bytes'] / 1e6:.3g}"]
            rows.append([*cells, f"{one['bits']:.3g}" if "bits" in one else "", str(one.get("rounds", ""))])
            if kind != "digits":
                computing = pace(evidence, kind) * one["steps"]
                rows[-1] += [f"{mean(record['seconds'] for record in by_seed.values()):.0f}"]
                rows[-1] += [f"{computing + 8 * one['bytes'] / link:.0f}" for link in LINKS.values()]
    if kind != "digits":
        head += ["s here", *(f"s at {name}" for name in LINKS)]
    return markdown([head, *rows])


def pace(evidence: Evidence, kind: str) -> float:
    """Compute time of a step, from the baseline's fastest run (any optimizer's fastest if there is none)."""
    runs = [run for run, record in evidence.records.items() if run.kind == kind and record["score"] is not None]
    of_baseline = [run for run in runs if run.optimizer == evidence.baseline] or runs
    return float(min(evidence.records[run]["seconds"] / evidence.records[run]["steps"] for run in of_baseline))


def of_use(evidence: Evidence, kind: str) -> list[str]:
    """Downstream results at each optimizer's own best learning rate."""
    records = evidence.of_chosen(kind)
    of_best = {name: by_rate.get(evidence.best_rate(kind, name) or 0.0, {}) for name, by_rate in records.items()}
    columns = {name: _uses(by_seed) for name, by_seed in of_best.items()}
    uses = list(dict.fromkeys(use for values in columns.values() for use in values))
    if not uses:
        return []
    counts = {use: evidence.counts[use] for use in uses if use in evidence.counts} if kind == "bert" else {}
    rows, told_apart, is_tested = [], [], False
    for use in uses:
        cells = [use] + ([f"{counts[use]:.1f}" if use in counts else ""] if counts else [])
        for name in columns:
            values, theirs = columns[name].get(use, {}), columns.get(evidence.baseline, {}).get(use, {})
            cells.append(spread(list(values.values()), 4 if use.endswith("bits per byte") else 2) if values else "")
            pairs = [(values[seed], theirs[seed]) for seed in values if seed in theirs]
            is_tested |= len(pairs) > 1 and name != evidence.baseline
            if len(pairs) > 1 and any(one != other for one, other in pairs):
                p = float(stats.ttest_rel(*zip(*pairs, strict=True)).pvalue)
                if p < SIGNIFICANT:
                    told_apart.append(f"{name} from {evidence.baseline} on {use} (p = {p:.2g})")
        rows.append(cells)
    if kind == "bert":
        rows.append(["**average**"] + ([f"{mean(counts.values()):.1f}" if counts else ""] if counts else []))
        for name in columns:
            complete = [mean(found.values()) for use in uses if (found := columns[name].get(use))]
            rows[-1].append(f"{mean(complete):.2f}" if len(complete) == len(uses) else "")
    head = ["task (per cent)" if kind == "bert" else "text", *(["counts of words"] if counts else []), *columns]
    verdict = "paired tests tell none apart" if is_tested else "one seed tells nothing apart"
    if told_apart:
        verdict = f"told apart by paired t-tests: {'; '.join(told_apart)}"
    return [markdown([head, *rows]), f"Means over pretraining seeds, ± one standard deviation; {verdict}.\n"]


def _uses(by_seed: Mapping[int, Record]) -> dict[str, dict[int, float]]:
    """Task or text -> pretraining seed -> value; for GLUE the median over fine-tuning seeds."""
    found: dict[str, dict[int, float]] = {}
    for seed, record in by_seed.items():
        values = {task: median(next(iter(of.values()))) for task, of in (record.get("glue") or {}).items()}
        values |= {f"{text}, bits per byte": bits for text, bits in (record.get("texts") or {}).items()}
        if "lambada" in record:
            values["LAMBADA, last word right (per cent)"] = record["lambada"]
        for use, value in values.items():
            found.setdefault(use, {})[seed] = value
    return found


def spread(values: list[float], digits: int) -> str:
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def difference(gaps: list[float], digits: int) -> str:
    """Mean of paired differences, with its standard error."""
    if not gaps:
        return ""
    error = f" (se {stdev(gaps) / math.sqrt(len(gaps)):.{digits}f})" if len(gaps) > 1 else ""
    return f"{mean(gaps):+.{digits}f}{error}"


def parts(evidence: Evidence) -> dict[str, Part]:
    """Kind -> comparison of the runs at each optimizer's best learning rate, of those that have metrics."""
    found = {}
    for kind in KINDS:
        runs = []
        for name, by_rate in evidence.of_chosen(kind).items():
            for seed, record in by_rate.get(evidence.best_rate(kind, name) or 0.0, {}).items():
                if record.get("metrics"):
                    title = f"{KINDS[kind]}, {name}, seed {seed}"
                    runs.append(run_of_lines(title, record["metrics"], record["settings"], record["environment"]))
        if runs:
            found[kind] = compare_runs(runs, CompareConfig())[0]
    return found


def page(evidence: Evidence, compared: Mapping[str, Part]) -> str:
    """Text of docs/study.md."""
    names = ", ".join(evidence.spec.optimizers)
    of_kinds = []
    for kind, title in KINDS.items():
        if not evidence.of_chosen(kind):
            continue
        of_kinds += [f"## {title}", _size(evidence, kind)]
        if kind in compared:
            of_kinds.append("\n".join(f"* {sentence}" for sentence in answers(compared[kind].summary)))
        of_kinds += [of_training(evidence, kind).rstrip(), *map(str.rstrip, of_use(evidence, kind))]
        of_kinds += ["With the first seed, by learning rate:", _by_rate(evidence, kind)]
        for panel in _panels(compared[kind]) if kind in compared else []:
            of_kinds.append(f"![{panel.title}, {title}](study/{kind}_{file_name(panel.title)}.svg)")
    lines = [
        f"# Study: the same models with {names}",
        "<!-- Written by benchmarks/study.py; do not edit. -->",
        f"Each model is trained with each optimizer on {evidence.spec.replicas} replicas, which are processes of one"
        " machine. What was run, its records and how to run it again:"
        " `benchmarks/results/pretrain_and_finetune.yaml`, `.jsonl` and `.md`. `python benchmarks/study.py` makes this"
        " page and its figures of the records alone. The figures with their numbers as tables, and more of them, are on"
        " [one page](study/index.html) that `megatron01 compare` draws.",
        "Learning rates are tuned alike: each with the first seed, then every optimizer's own best rate and the first"
        " optimizer's best with all seeds. Bytes are counted where they are sent, by one replica. Seconds here were"
        " measured beside other work. Seconds at a link are computed: for every optimizer the computing of the quickest"
        " run of the first, and all bytes at the link's full rate, without overlap or latency. Full gradients are sent"
        " in fp32, as these runs train in it; with 16-bit weights they are half as large, Adam's at every step (dotted"
        " in the README's picture).",
        *of_kinds,
        "## What it took",
        _costs(evidence),
        "\n".join(_notes(evidence)),
        "`megatron01 compare RUN ...` draws the same of your own runs: [dashboards](dashboards.md).",
    ]
    return "\n\n".join(lines) + "\n"


def _size(evidence: Evidence, kind: str) -> str:
    """Parameters and steps of the runs, if known, and the part of GLUE that they are fine-tuned on."""
    record = next(
        record for run, record in evidence.records.items() if run.kind == kind and record["score"] is not None
    )
    if "steps" not in record:
        return f"Trained with `{getattr(evidence.spec, kind)['flags']}`."
    text = f"{record['steps']:,} steps"
    if record["bits"]:
        text = f"{format_count(8 * record['bytes'] / record['bits'] / record['steps'])} parameters, {text}"
    rows = evidence.spec.glue.get("train_rows") if kind == "bert" and evidence.spec.glue is not None else None
    text += f"; of each training set of GLUE the first {rows:,} rows." if rows else "."
    for name, by_rate in evidence.of_chosen(kind).items():
        of_seeds = next(iter(by_rate.values()))
        settings = next(iter(of_seeds.values())).get("settings", {})
        policy = settings.get("optimizer.sync_policy")
        if policy and "sync_policy" in find_optimizer(settings["optimizer.optimizer"]).planned_settings:
            text += f" {name}: `--sync-policy {policy}`."
    return text


def _by_rate(evidence: Evidence, kind: str) -> str:
    rates, rows = evidence.rates(kind), []
    for optimizer in evidence.spec.optimizers:
        of_first = {run.rate: record for run, record in evidence.records.items()
                    if (run.kind, run.optimizer, run.seed) == (kind, optimizer, evidence.spec.seeds[0])}  # fmt: skip
        scores = [of_first[rate]["score"] if rate in of_first else math.nan for rate in rates]
        shown = ["diverged" if score is None else "" if math.isnan(score) else f"{score:.4f}" for score in scores]
        rows.append([optimizer, *shown])
    return markdown([["optimizer", *(f"{rate:g}" for rate in rates)], *rows]).rstrip()


def _costs(evidence: Evidence) -> str:
    rows = [["", "runs, tuning included", "training time", "sent by one replica"]]
    for kind, title in KINDS.items():
        of_kind = [record for run, record in evidence.records.items() if run.kind == kind]
        if of_kind:
            seconds, sent = (sum(record.get(key, 0.0) for record in of_kind) for key in ("seconds", "bytes"))
            rows.append([title, str(len(of_kind)), format_duration(seconds) if seconds else "", format_bytes(sent)])
    return markdown(rows).rstrip()


def _panels(part: Part) -> list[charts.Panel]:
    return [panel for panel in part.panels if panel.title in FIGURES]


def draw(evidence: Evidence, kind: str, folder: Path) -> list[Path]:
    """Held-out loss against bytes and against time on a slow link, for each theme: means over the seeds.

    The baseline is drawn twice: as run, with gradients in training precision, and with half the bytes, as in 16 bits.
    """
    written = []
    for theme, (text, grid) in THEMES.items():
        style: dict[Any, Any] = {"text.color": text, "axes.labelcolor": text, "xtick.color": text, "ytick.color": text}
        style |= {"axes.edgecolor": grid, "grid.color": grid, "svg.hashsalt": "megatron01", "font.size": 11}
        with plt.rc_context(style):
            figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
            for (name, by_rate), colour in zip(evidence.of_chosen(kind).items(), COLOURS, strict=False):
                by_seed = by_rate.get(evidence.best_rate(kind, name) or 0.0, {})
                is_baseline = name == evidence.baseline
                titles = [f"{name}, 32-bit gradients", f"{name}, 16-bit gradients"] if is_baseline else [name]
                for title, share, dashes in zip(titles, (1.0, 0.5), ("-", ":"), strict=False):
                    megabytes, minutes, losses = _curve(list(by_seed.values()), share, pace(evidence, kind))
                    left.plot(megabytes, losses, dashes, color=colour, label=title, linewidth=2)
                    right.plot(minutes, losses, dashes, color=colour, linewidth=2)
            scale = "log" if megabytes[0] else "linear"
            left.set(xscale=scale, xlabel="MB sent by one replica", ylabel="held-out loss")
            right.set(xlabel=f"minutes of computing, and of sending at {SLOW_LINK}", ylabel="held-out loss")
            for axes in (left, right):
                axes.grid(alpha=0.6)
                axes.spines[["top", "right"]].set_visible(False)
            figure.legend(loc="outside lower center", ncols=4, frameon=False, labelcolor=text)
            written.append(folder / f"loss_{theme}.svg")
            figure.savefig(written[-1], transparent=True, metadata={"Date": None})
            plt.close(figure)
    return written


def _curve(records: list[Record], share: float, seconds: float) -> tuple[list[float], list[float], list[float]]:
    """Megabytes, minutes on a slow link, and held-out loss at each evaluation; means over runs.

    ``share`` of the sent bytes are counted; ``seconds`` is the compute time of a step.
    """
    lines = list(zip(*(record["metrics"] for record in records), strict=True))
    sent = share * np.array([[line["comm_bytes_total"] for line in of_step] for of_step in lines])  # (e, n)
    computing = seconds * np.array([of_step[0]["iteration"] for of_step in lines])  # (e,)
    losses = [fmean(line["eval_loss"] for line in of_step) for of_step in lines]
    minutes = (computing + 8 * sent.mean(1) / LINKS[SLOW_LINK]) / 60
    return (sent.mean(1) / 1e6).tolist(), minutes.tolist(), losses


def write_study(evidence: Evidence, docs: Path) -> list[Path]:
    """Write all pages and figures; returns the files."""
    compared, folder, pictures = parts(evidence), docs / "study", docs / "pictures"
    for path in (folder, pictures):
        path.mkdir(parents=True, exist_ok=True)
    written = [docs / "study.md"]
    written[0].write_text(page(evidence, compared), encoding="utf-8")
    for kind, part in compared.items():
        for panel in _panels(part):
            written.append(folder / f"{kind}_{file_name(panel.title)}.svg")
            charts.save(panel.charts, written[-1], title=f"{panel.title}: {KINDS[kind]}")
    if compared:
        config = CompareConfig(output=folder, title=f"The study: {', '.join(evidence.spec.optimizers)}", png=False)
        written += write(list(compared.values()), config, [])
        # the last of the models with the most runs
        most = max(reversed(compared), key=lambda kind: sum(run.kind == kind for run in evidence.records))
        written += draw(evidence, most, pictures)
    return written


def write_runs(evidence: Evidence, folder: Path) -> list[Path]:
    """Write the run folder of each record that has metrics: what ``megatron01 compare`` reads. Returns the folders."""
    written = []
    for run, record in evidence.records.items():
        if not record.get("metrics"):
            continue
        place = folder / f"{run.kind}-{run.folder(folder).name}"  # one level: folders' names are those of runs
        place.mkdir(parents=True, exist_ok=True)
        sections: dict[str, dict[str, str]] = {}
        for key, value in record["settings"].items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        (place / "config.yaml").write_text(yaml.safe_dump(sections), encoding="utf-8")
        (place / "environment.json").write_text(json.dumps(record["environment"]), encoding="utf-8")
        lines = "".join(json.dumps(line) + "\n" for line in record["metrics"])
        (place / "metrics.jsonl").write_text(lines, encoding="utf-8")
        written.append(place)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    records = ROOT / "benchmarks" / "results" / "pretrain_and_finetune.jsonl"
    parser.add_argument("--records", type=Path, default=records)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder that is written into")
    parser.add_argument("--runs", type=Path, help="write run folders here, and nothing else")
    arguments = parser.parse_args()
    write, folder = (write_study, arguments.docs) if arguments.runs is None else (write_runs, arguments.runs)
    evidence = Evidence.read(arguments.records)
    with writing(folder):
        made = write(evidence, folder)
    for path in made:
        print(f"written: {path}")


if __name__ == "__main__":
    run_program(main)
