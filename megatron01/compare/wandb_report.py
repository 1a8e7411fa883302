"""``megatron01 compare --wandb``: the comparison at wandb, as a run of its own and, online, as a report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatron01.compare.answers import answers
from megatron01.compare.command import CompareConfig
from megatron01.compare.page import Part
from megatron01.compare.runs import Run, read_lines
from megatron01.compare.summary import table
from megatron01.errors import UserError
from megatron01.monitor.wandb_writer import (
    AXES,
    BYTES,
    HOURS,
    STEP,
    TOKENS,
    WandbRun,
    WandbWriter,
    end_service,
    import_wandb,
)
from megatron01.utils.files import open_regular

IMPORTED = "imported_runs"
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
    """Log the runs that are not at wandb yet, then the comparison, and make the report if wandb is reached.

    Raises:
        UserError: if no project is known, wandb is not installed, or it refuses.
    """
    runs = [run for part in parts for group in part.section.groups for run in group.runs]
    project = config.wandb_project or _project_of(runs)
    wandb = import_wandb(project, config.wandb_mode)
    ids = {run.name: _id_of(run, config, project) for run in runs}
    try:
        _log_comparison(wandb, config, project, parts, files)
        if config.wandb_mode == "online":
            print(f"report: {_make_report(config, project, parts, ids)}")
    except Exception as error:
        raise UserError(
            f"wandb does not take the comparison ({' '.join(str(error).split())[:300]}); run 'wandb login', or leave"
            " out --wandb-mode online"
        ) from error
    if config.wandb_mode == "offline":
        places = [config.output, *(_place(run, config) for run in runs)]
        folders = " ".join(shlex.quote(str(place / "wandb")) + "/offline-run-*" for place in places)
        print(f"written: offline runs; upload them with: wandb sync {folders}")
        print("the report needs the runs to be there: after that, give --wandb-mode online as well")


def _project_of(runs: Sequence[Run]) -> str:
    for run in runs:
        project = run.settings.get("logging.wandb_project", "None")
        if project not in ("None", "null", ""):
            return project
    raise UserError("none of the runs was logged to wandb, so that no project is known; give --wandb-project")


def _place(run: Run, config: CompareConfig) -> Path:
    """The folder with a run's id, and with its files where they are offline."""
    assert run.folder is not None
    return run.folder if WandbRun.read(run.folder) is not None else config.output / IMPORTED / run.name


def _id_of(run: Run, config: CompareConfig, project: str) -> str:
    """The id of the run at wandb; one that was not logged there is logged from its metrics.jsonl, once."""
    assert run.folder is not None
    place = _place(run, config)
    known = WandbRun.read(place)
    if known is not None:
        if place != run.folder:
            print(
                f"note: {run.name} was logged from its metrics before; to do it again, remove {place}", file=sys.stderr
            )
        return known.id
    place.mkdir(parents=True, exist_ok=True)
    writer = WandbWriter(
        place,
        project=project,
        name=run.name,
        mode=config.wandb_mode,
        config={**_nested(run.settings), **run.environment},
        seq_length=run.seq_length,
    )
    with open_regular(run.folder / "metrics.jsonl") as file:
        lines, _ = read_lines(cast(BinaryIO, file))
    for line, sent, rounds, seconds in zip(lines, run.bytes_sent, run.rounds, run.recorded_seconds, strict=False):
        totals = {
            "comm_bytes_total": float(sent),
            "comm_rounds_total": float(rounds),
            "training_seconds": float(seconds),
        }
        writer.write_line({"consumed_samples": 0, **totals, **line})
    writer.close()
    return writer.run.id


def _nested(settings: Mapping[str, str]) -> dict[str, Any]:
    nested: dict[str, dict[str, str]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    return dict(nested)


def _log_comparison(
    wandb: Any, config: CompareConfig, project: str, parts: Sequence[Part], files: Sequence[Path]
) -> None:
    """A run with the tables, the page and the pictures."""
    run = wandb.init(
        project=project,
        entity=config.wandb_entity,
        name=config.title,
        job_type="comparison",
        dir=str(config.output),
        mode=config.wandb_mode,
        config={"runs": [run.name for part in parts for group in part.section.groups for run in group.runs]},
        reinit="create_new",
    )
    logged: dict[str, Any] = {"comparison/page": wandb.Html(files[0].read_text(encoding="utf-8"), inject=False)}
    for number, part in enumerate(parts, start=1):
        header, *rows = table(part.summary)
        logged[f"comparison/summary_{number}"] = wandb.Table(columns=header, data=rows)
    for path in files[1:]:
        logged[f"comparison/{path.stem}"] = wandb.Image(str(path))
    run.log(logged)
    run.finish()
    end_service()


def build_report(config: CompareConfig, project: str, parts: Sequence[Part], ids: Mapping[str, str]) -> Any:
    """The report, not saved yet: for each section its table and panels, in which each group is a set of runs.

    Raises:
        UserError: if the library that makes reports is not installed.
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
            reports.MarkdownBlock(text=_markdown(part)),
            reports.PanelGrid(runsets=runsets, panels=panels),
        ]
    options = {"entity": entity} if entity else {}
    return reports.Report(project=project, title=config.title, blocks=blocks, width="fluid", **options)


def _make_report(config: CompareConfig, project: str, parts: Sequence[Part], ids: Mapping[str, str]) -> str:
    report = build_report(config, project, parts, ids)
    report.save()
    return str(report.url)


def _markdown(part: Part) -> str:
    header, *rows = table(part.summary)
    lines = [header, ["---"] * len(header), *rows]
    cells = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return "\n\n".join((*answers(part.summary), cells))
