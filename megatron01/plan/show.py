"""Shows a plan as text, JSON, CSV and picture. Imports torch, which takes seconds; ``command`` checks flags first."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from megatron01.plan.config import BertScheduleConfig, GPTScheduleConfig, PlanConfig
from megatron01.plan.model_size import parameter_sizes
from megatron01.plan.plot import save_plot
from megatron01.plan.published import RECIPES, evaluate, published_table
from megatron01.plan.sparkline import ramp
from megatron01.plan.summary import compare, others
from megatron01.plan.text import describe, title, to_json, write_csv
from megatron01.plan.volume import Wire, gradient_bytes, traffic


def show(config: GPTScheduleConfig | BertScheduleConfig) -> None:
    """The plan of one run.

    Raises:
        UserError: if the settings contradict each other or a file cannot be written.
    """
    optimizer, training, plan = config.optimizer, config.training, config.plan
    sizes, note = parameter_sizes(config)
    wire = Wire(parameter_sizes=sizes, replicas=plan.replicas, block_size=optimizer.block_size)
    run = traffic(optimizer, train_iters=training.train_iters, precision=training.precision, wire=wire)
    sent_by_others = others(run, optimizer, precision=training.precision, wire=wire)
    compared = compare(run, sent_by_others)
    notes = [note] if note else []
    if optimizer.freeze_step is None:
        notes.append("1-bit Adam is left out: give --freeze-step, the number of its full steps")
    if optimizer.error_limit > 0:
        notes.append("error_limit may add exchanges in full precision, which only training can tell")
    headline = title(
        run,
        optimizer=optimizer.optimizer,
        policy=optimizer.sync_policy,
        replicas=plan.replicas,
        gradient_bits=8 * gradient_bytes(optimizer, training.precision),
    )
    if plan.csv is not None:
        write_csv(plan.csv, run)
    if plan.plot is not None:
        save_plot(plan.plot, headline, run, sent_by_others)
    if plan.json:
        facts = {"optimizer": optimizer.optimizer, "sync_policy": optimizer.sync_policy, "replicas": plan.replicas}
        print(json.dumps(to_json(run, compared, **facts, notes=notes), indent=1))
    else:
        print(describe(headline, run, compared, characters=ramp(sys.stdout.encoding)))
        for text in notes:
            print(f"note: {text}")


def show_published(plan: PlanConfig) -> None:
    """The published experiments. Raises UserError if their recipes are not at hand."""
    results = [evaluate(recipe, plan.replicas) for recipe in RECIPES]
    if plan.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        print(published_table(results, plan.replicas))
