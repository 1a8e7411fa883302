"""``megatron01 squad``: a sweep over SQuAD 1.1, its tables, and the model of its best run."""

from __future__ import annotations

from megatron01.finetuning.config import SquadConfig
from megatron01.finetuning.metrics import check_packages
from megatron01.finetuning.report import best_lines, best_settings, comparison, own_row, result_files, settings_of
from megatron01.finetuning.running import common_settings, do_sweep, once, warn, write_tables
from megatron01.finetuning.squad_bench import COLUMNS, TASK, SquadBench, open_squad
from megatron01.finetuning.workers import devices_for


def squad(config: SquadConfig) -> None:
    """Do what is left of a sweep, and show and write its tables.

    Raises:
        UserError: if the model, the data or the folder cannot be used.
    """
    check_packages()
    bench = SquadBench(config, devices_for(config)[0])
    common = common_settings(
        config,
        command="squad",
        max_length=config.max_length,
        doc_stride=config.doc_stride,
        max_query_length=config.max_query_length,
        max_answer_length=config.max_answer_length,
        model=bench.pretrained.fingerprint,
    )
    columns_of = {TASK: COLUMNS}
    sweep = do_sweep(config, bench, open_squad, common, columns_of, {TASK: bench.data_fingerprint})
    settings = settings_of(sweep.results)
    best = best_settings(settings, columns_of)
    if not best:
        return
    spread = best_lines(best, columns_of)
    print("\nMedian over seeds of the best setting, in per cent:\n")
    print("\n".join(spread))
    cells = comparison([own_row(config.name or config.load, best, columns_of)], [column.title for column in COLUMNS])
    files = result_files(cells, settings, columns_of)
    write_tables(config.output, files)
    print(f"\nwrote {', '.join(files)} in {config.output}")
    run = best[TASK].best_run(COLUMNS[0].metric)
    print(f"answers of the best run: {bench.answers_folder(run)}")
    if config.save_models:
        if sweep.share.count > 1 or not sweep.is_complete:
            warn(
                "the model is made when all runs are finished, outside of array jobs; give the same command again then"
            )
            return
        folder = config.output / "models" / TASK

        def make() -> None:
            print(f"training once more: {run}", flush=True)
            bench.pretrained.save(bench.train(run)[0], folder)
            print(f"wrote {folder}")

        once(config.output / "finished" / f"{TASK}-save_models.json", run, bench.data_fingerprint, make)
