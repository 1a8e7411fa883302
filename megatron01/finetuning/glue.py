"""``megatron01 glue``: a sweep over tasks of GLUE, its tables, and what is made of its best runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from megatron01.finetuning.config import TASK_NAMES, GlueConfig
from megatron01.finetuning.glue_bench import GlueBench, open_glue
from megatron01.finetuning.metrics import check_packages
from megatron01.finetuning.published import NOTE, PUBLISHED, TableRow, read_published
from megatron01.finetuning.report import (
    Setting,
    best_lines,
    best_settings,
    comparison,
    own_row,
    result_files,
    settings_of,
)
from megatron01.finetuning.running import Sweep, common_settings, do_sweep, once, warn, write_tables
from megatron01.finetuning.submission import predictions, write_submission
from megatron01.finetuning.sweep import Run
from megatron01.finetuning.tasks import TASKS, Column, Task
from megatron01.finetuning.workers import devices_for
from megatron01.tables import columns as lines_of


def glue(config: GlueConfig) -> None:
    """Do what is left of a sweep, and show and write its tables.

    Raises:
        UserError: if the model, the data or the folder cannot be used.
    """
    check_packages()
    every_title = tuple(column.title for task in TASKS.values() for column in task.columns)
    added = [] if config.published is None else read_published(config.published, every_title)
    device = devices_for(config)[0]
    tasks = [TASKS[name] for name in TASK_NAMES if name in config.tasks]
    bench = GlueBench(config, device)
    for task in tasks:
        for note in bench.data(task.name).notes:
            warn(note)
    common = common_settings(
        config,
        command="glue",
        max_length=config.max_length,
        model=bench.pretrained.fingerprint,
        mnli_model=None if bench.from_mnli is None else bench.from_mnli.fingerprint,
    )
    columns_of = {str(task.name): task.columns for task in tasks}
    data_of = {str(task.name): bench.data(task.name).fingerprint for task in tasks}
    sweep = do_sweep(config, bench, open_glue, common, columns_of, data_of)
    settings = settings_of(sweep.results)
    best = best_settings(settings, columns_of)
    if best:
        _show(config, settings, best, columns_of, added)
    if config.save_models or config.submission:
        _finish(config, sweep, bench, tasks, best)


def _show(
    config: GlueConfig,
    settings: Sequence[Setting],
    best: Mapping[str, Setting],
    columns_of: Mapping[str, Sequence[Column]],
    added: Sequence[TableRow],
) -> None:
    titles = [column.title for columns in columns_of.values() for column in columns]
    rows = [*PUBLISHED, *added, own_row(config.name or config.load, best, columns_of)]
    cells = comparison(rows, titles)
    spread = best_lines(best, columns_of)
    print("\nMedian over seeds of the best setting, in per cent:\n")
    print("\n".join(spread))
    print("\nBeside published results:\n")
    print("\n".join(lines_of(cells)))
    note = NOTE
    if config.mnli_model is not None:
        note += f" RTE, MRPC and STS-B started from {config.mnli_model}, which the published rows did not."
    print(f"\n{note}")
    spread_text = "\n".join(f"    {line}" for line in spread)
    remarks = f"\n{note}\n\nMedian over seeds of the best setting:\n\n{spread_text}\n"
    files = result_files(cells, settings, columns_of, remarks)
    write_tables(config.output, files)
    print(f"wrote {', '.join(files)} in {config.output}")


def _finish(
    config: GlueConfig, sweep: Sweep, bench: GlueBench, tasks: Sequence[Task], best: Mapping[str, Setting]
) -> None:
    """Models and predictions of the best runs."""
    if sweep.share.count > 1 or not sweep.is_complete:
        warn(
            "models and predictions are made when all runs are finished, outside of array jobs; give the same command"
            " again then"
        )
        return
    for task in tasks:
        run = best[task.name].best_run(task.columns[0].metric)
        wanted = "-".join(name for name in ("save_models", "submission") if getattr(config, name))
        marker = config.output / "finished" / f"{task.name}-{wanted}.json"
        data = bench.data(task.name).fingerprint
        once(marker, run, data, partial(_make, config, bench, task, run))


def _make(config: GlueConfig, bench: GlueBench, task: Task, run: Run) -> None:
    print(f"training once more: {run}", flush=True)
    model, _ = bench.train(run)
    if config.save_models:
        folder = config.output / "models" / task.name
        bench.save(model, task, folder)
        print(f"wrote {folder}")
    for split in task.test if config.submission else ():
        predicted = bench.predict(model, task, split)
        if predicted is None:
            continue
        examples, outputs = predicted
        path = config.output / "submission" / split.submission
        write_submission(path, examples, predictions(task, outputs))
        print(f"wrote {path} ({len(examples)} predictions)")
