"""``megatron01 compare``: run folders as an HTML page, figures, a table on the terminal, and with --wandb a report."""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron01.compare import charts, page
from megatron01.compare.conclusions import answers, caption_of, table
from megatron01.compare.grouping import Section, sections
from megatron01.compare.page import Part
from megatron01.compare.runs import Run, read_metrics, read_run
from megatron01.compare.summary import conditions, summarize
from megatron01.config.command_line import parse
from megatron01.config.commands import CompareConfig
from megatron01.errors import UserError
from megatron01.monitor.wandb_writer import (
    AXES,
    BYTES,
    HOURS,
    STEP,
    TOKENS,
    WandbRun,
    end_service,
    import_wandb,
    limited_wait,
    open_run,
    to_wandb,
)
from megatron01.utils.files import write_atomically, writing
from megatron01.utils.formatting import columns, format_duration, markdown, one_line

PAGE_NAME = "index.html"
_OF_OURS = b'<meta name="generator" content="megatron01 compare">'  # stands in the head of every page
_HEAD = 4096  # bytes
_MOST_NAMED = 4  # runs in a note
_WIDTH = 120  # of text on the terminal


def compare(argv: Sequence[str], prog: str) -> None:
    """Compare the runs in the folders of the command line; unusable ones are reported and left out.

    Raises UserError for a mistake in the settings, if no run can be shown, or if a file cannot be written.
    """
    folders: list[str] = []
    config = parse(
        CompareConfig,
        argv,
        arguments=folders,
        prog=f"{prog} RUN ...",
        description="Compare runs by their folders: losses over steps, tokens, time and bytes, and what they sent.",
    )
    if not folders:
        raise UserError(f"no run is given; expected {prog} RUN ..., each the folder of a run (its --run-dir)")
    if config.png:
        charts.require_matplotlib()
    runs, notes = _read_runs(folders)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if not runs:
        raise UserError("none of the folders holds a run that can be shown")
    parts = compare_runs(runs, config)
    files = write(parts, config, notes)
    for part in parts:
        print(_describe(part))
    print(f"written: {files[0]}" + (f" and {len(files) - 1} pictures beside it" if len(files) > 1 else ""))
    if config.wandb:
        upload(config, parts, files)


def _read_runs(names: Sequence[str]) -> tuple[list[Run], list[str]]:
    """The readable runs, with unique names, and notes on why others were left out."""
    folders: dict[Path, Path] = {}
    runs, notes = [], []
    for path in map(Path, names):
        real = Path(os.path.realpath(path))
        if real in folders:
            notes.append(f"{path} is given twice; it counts once")
        folders.setdefault(real, path)
    for real, path in folders.items():
        try:
            runs.append(read_run(path, _name(real, folders)))
        except UserError as error:
            notes.append(f"left out: {error}")
    return runs, notes


def _name(path: Path, folders: Iterable[Path]) -> str:
    """The shortest end of a folder's path that is unique among ``folders``."""
    length = 1
    while length < len(path.parts) and sum(other.parts[-length:] == path.parts[-length:] for other in folders) > 1:
        length += 1
    return "/".join(path.parts[-length:]).lstrip("/")


def compare_runs(runs: Sequence[Run], config: CompareConfig) -> list[Part]:
    """Summary, charts and notes of each section. Raises UserError if no group matches the baseline."""
    parts = []
    for number, section in enumerate(sections(runs)):
        summary = summarize(
            section.groups,
            baseline=config.baseline if number == 0 else None,
            target=config.target_loss,
            smoothing=config.smoothing,
            freeze_step=config.freeze_step,
        )
        panels = charts.panels(section.groups, summary, config.smoothing)
        parts.append(Part(section, summary, tuple(panels), tuple(_notes_about(section))))
    return parts


def _notes_about(section: Section) -> list[str]:
    notes = [f"{run.name}: {note}" for run in section.runs for note in run.notes]
    ends = {}
    for group in section.groups:
        shortest = min(group.runs, key=lambda run: run.last_iteration)
        last = max(run.last_iteration for run in group.runs)
        if shortest.last_iteration < last:
            notes.append(
                f"{group.label}: its runs end between iterations {shortest.last_iteration:,} and {last:,}; their mean"
                f" is drawn up to the end of {shortest.name}"
            )
        if not group.has_diverged:
            ends[group.label] = last
    if len(set(ends.values())) > 1:
        steps = ", ".join(f"{label} {last:,}" for label, last in ends.items())
        notes.append(f"runs of different lengths, so that final losses do not compare (last iterations: {steps})")
    for what, found in conditions(section.groups).items():
        if len(found) > 1:
            notes.append(f"runs of different {what} ({'; '.join(sorted(found))}): times do not compare")
    notes += [
        f"{run.name}: the time of its first {run.untimed_steps:,} steps is not on record, as when a run goes on in"
        " another folder; its times are those of the steps after them"
        for run in section.runs
        if run.untimed_steps
    ]
    slow = [
        f"{run.name} ({format_duration(one.step_seconds)} a step up to iteration {run.iterations[one.line]:.0f}, then"
        f" {format_duration(one.usual)})"
        for run in section.runs
        for one in run.warm_ups
    ]
    if slow:
        more = f" and {len(slow) - _MOST_NAMED} more" if len(slow) > _MOST_NAMED else ""
        notes.append(
            "compilation or warm-up in the first interval after a start is left out of all times, its steps count as"
            f" long as those after it: {', '.join(slow[:_MOST_NAMED])}{more}"
        )
    return notes


def write(parts: Sequence[Part], config: CompareConfig, notes: Sequence[str]) -> list[Path]:
    """Write the page and, if asked for, a figure of each panel; returns their paths, the page's first.

    An earlier page in the folder is replaced, and its figures are removed. Raises UserError if the folder has an
    index.html of something else, or a file cannot be written or removed.
    """
    path = config.output / PAGE_NAME
    figures = re.compile(rf"(\d+_)?({'|'.join(map(file_name, charts.TITLES))})\.png")
    earlier: list[Path] = []
    with writing(f"--output {config.output}"):
        if path.is_file():
            with path.open("rb") as old:
                if _OF_OURS not in old.read(_HEAD):
                    raise UserError(f"{path} is no page of compare; remove it, or give another --output")
            earlier = [file for file in config.output.glob("*.png") if figures.fullmatch(file.name)]
        config.output.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page.render(config.title, parts, notes))
    files = [path]
    if config.png:
        for number, part in enumerate(parts, start=1):
            prefix = f"{number}_" if len(parts) > 1 else ""
            for panel in part.panels:
                files.append(config.output / f"{prefix}{file_name(panel.title)}.png")
                charts.save(panel.charts, files[-1], title=f"{panel.title}: {part.section.title}")
    with writing(f"--output {config.output}"):
        for file in {*earlier} - {*files}:
            file.unlink()
    return files


def file_name(title: str) -> str:
    """A title as a file name: lower-case letters, digits and underscores."""
    return re.sub(r"[\W_]+", "_", title.lower()).strip("_")


def _describe(part: Part) -> str:
    """A section as text for the terminal."""
    summary, lines = part.summary, [part.section.title]
    if part.section.differs:
        lines.append(f"  not to be compared with the first: {part.section.differs}")
    for text in (*answers(summary), *(f"note: {note}" for note in part.notes), caption_of(summary)):
        lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    lines += ["  " + line for line in columns(table(summary))]
    return "\n".join(lines) + "\n"


# The comparison on wandb: a run of its own and, online, a report.

_AXIS_WORDS = {STEP: "steps", TOKENS: "tokens", HOURS: "hours", BYTES: "bytes sent"}
_OTHER_PANELS = (
    ("Learning rate", "schedule/lr"),
    ("Steps between two synchronizations", "schedule/interval"),
    ("Kind of step (0 skipped, 1 local, 2 1-bit, 3 full)", "schedule/kind"),
    ("Bytes sent", BYTES),
    ("Exchanges", "traffic/rounds_total"),
    ("Bits per parameter and step", "traffic/bits_per_parameter"),
    ("Relative error of compression", "compression/error"),
    ("Tokens per second", "speed/tokens_per_second"),
)


def upload(config: CompareConfig, parts: Sequence[Part], files: Sequence[Path]) -> None:
    """Log the runs that are not on wandb yet, then the comparison, and in online mode create the report.

    Raises UserError if no project is known, wandb is not installed, or the upload fails.
    """
    runs = [run for part in parts for run in part.section.runs]
    project = config.wandb_project or _project_of(runs)
    wandb = import_wandb(project, config.wandb_mode)
    folders, ids = [config.output], {}
    try:
        for run in runs:
            folder, ids[run.name] = _on_wandb(run, config, project)
            folders.append(folder)
        _log_comparison(wandb, config, project, parts, files)
        if config.wandb_mode == "online":
            report = build_report(config, project, parts, ids)
            report.save()
            print(f"report: {report.url}")
    except UserError:
        raise
    except Exception as error:
        advice = "; run 'wandb login', or leave out --wandb-mode online" if config.wandb_mode == "online" else ""
        raise UserError(f"wandb does not take the comparison ({one_line(error, 300)}){advice}") from error
    finally:
        end_service()
    if config.wandb_mode == "offline":
        written = " ".join(shlex.quote(str(folder / "wandb")) + "/offline-run-*" for folder in folders)
        print(f"written: offline runs; upload them with: wandb sync {written}")
        print("the report needs the runs to be there: after that, give --wandb-mode online as well")


def _project_of(runs: Sequence[Run]) -> str:
    for run in runs:
        project = run.settings.get("logging.wandb_project", "None")
        if project not in ("None", "null", ""):
            return project
    raise UserError("none of the runs was logged to wandb, so that no project is known; give --wandb-project")


def _on_wandb(run: Run, config: CompareConfig, project: str) -> tuple[Path, str]:
    """Folder of a run's wandb files, and its wandb id.

    A run that was not logged to wandb is logged from its metrics.jsonl, once. Raises an error of wandb.
    """
    assert run.folder is not None
    logged = WandbRun.read(run.folder)
    if logged is not None:
        return run.folder, logged.id
    folder = config.output / "imported_runs" / run.name
    imported = WandbRun.read(folder)
    if imported is not None:
        again = f"to do it again, remove {folder}"
        print(f"note: {run.name} was logged from its metrics before; {again}", file=sys.stderr)
        return folder, imported.id
    folder.mkdir(parents=True, exist_ok=True)
    new = WandbRun()
    settings: dict[str, dict[str, str]] = {}  # by section, as a run logs them
    for key, value in run.settings.items():
        section, _, setting = key.partition(".")
        settings.setdefault(section, {})[setting] = value
    wandb_run = open_run(
        folder,
        config.wandb_mode,
        project=project,
        entity=config.wandb_entity,
        name=run.name,
        id=new.id,
        config={**settings, **run.environment},
    )
    lines, _ = read_metrics(run.folder / "metrics.jsonl")
    totals = {
        "consumed_samples": run.columns["consumed_samples"],
        "comm_bytes_total": run.bytes_sent,
        "comm_rounds_total": run.rounds,
        "training_seconds": run.recorded_seconds,
    }
    for number, line in enumerate(lines[: run.iterations.size]):
        known = line | {key: float(column[number]) for key, column in totals.items()}
        values = to_wandb(known, seq_length=run.seq_length) | {"progress/attempt": 1}
        wandb_run.log(values, step=line["iteration"])
    wandb_run.finish()
    new.write(folder)
    return folder, new.id


def _log_comparison(
    wandb: Any, config: CompareConfig, project: str, parts: Sequence[Part], files: Sequence[Path]
) -> None:
    """Log a wandb run with the tables, the page and the figures."""
    run = wandb.init(
        project=project,
        entity=config.wandb_entity,
        name=config.title,
        job_type="comparison",
        dir=str(config.output),
        mode=config.wandb_mode,
        config={"runs": [run.name for part in parts for run in part.section.runs]},
        reinit="create_new",
        settings=limited_wait(),
    )
    logged: dict[str, Any] = {"comparison/page": wandb.Html(files[0].read_text(encoding="utf-8"), inject=False)}
    for number, part in enumerate(parts, start=1):
        header, *rows = table(part.summary)
        logged[f"comparison/summary_{number}"] = wandb.Table(columns=header, data=rows)
    for path in files[1:]:
        logged[f"comparison/{path.stem}"] = wandb.Image(str(path))
    run.log(logged)
    run.finish()


def build_report(config: CompareConfig, project: str, parts: Sequence[Part], ids: Mapping[str, str]) -> Any:
    """The wandb report, not saved yet: table and panels of each section, with one run set per group.

    Raises UserError if wandb-workspaces is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as reports
    except ImportError as error:
        raise UserError(
            f"the report needs wandb-workspaces ({error}); install it with: pip install 'megatron01[logging]'"
        ) from None
    entity = config.wandb_entity or ""
    blocks: list[Any] = []
    for part in parts:
        runsets = [
            reports.Runset(
                project=project,
                entity=entity,
                name=group.label,
                filters=f"Metric('ID') in {[ids[run.name] for run in group.runs]!r}",
            )
            for group in part.section.groups
        ]
        panels: list[Any] = [
            reports.LinePlot(
                title=f"{words} by {_AXIS_WORDS[axis]}", x=axis, y=[f"{section}/{kind}"], log_x=axis == BYTES
            )
            for section, axis in AXES.items()
            for kind, words in (("train", "Training loss"), ("held_out", "Held-out loss"))
        ]
        panels += [reports.LinePlot(title=title, x=STEP, y=[name]) for title, name in _OTHER_PANELS]
        blocks += [
            reports.H2(part.section.title),
            reports.MarkdownBlock(text="\n\n".join([*answers(part.summary), markdown(table(part.summary))])),
            reports.PanelGrid(runsets=runsets, panels=panels),
        ]
    options = {"entity": entity} if entity else {}  # without it, wandb uses the default entity
    return reports.Report(project=project, title=config.title, blocks=blocks, width="fluid", **options)
