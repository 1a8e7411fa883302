"""Time and memory of a training step by part, with 0/1 Adam and with Adam.

    python benchmarks/step.py --size base --steps 3 --json result.json

Prints Markdown: the phases of a step, the optimizer's arithmetic against torch's fused AdamW, the steps of every
optimizer, and bytes per parameter. Linux only, as it reads /proc. README.md explains the columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import step_arithmetic
import step_memory
import step_optimizers
import step_phases
from reporting import at_least, report, run_program
from workload import RECIPES, Workload


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of a training step with 0/1 Adam and with Adam.")
    parser.add_argument("--size", default="debug", help=f"of the model: {sizes_of('gpt2')}; {sizes_of('bert')}")
    parser.add_argument("--model", choices=("gpt2", "bert"), default="gpt2")
    parser.add_argument(
        "--replicas", type=at_least(1), default=2, help="processes on this machine, one thread each (default: 2)"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the phases and the memory")
    parser.add_argument("--steps", type=at_least(1), default=5, help="measured steps of each kind (default: 5)")
    parser.add_argument("--section", choices=tuple(SECTIONS), action="append", help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    arguments = parser.parse_args()
    if arguments.size not in RECIPES[arguments.model]:
        parser.error(f"--size is {arguments.size}; expected {sizes_of(arguments.model)}")

    workload = Workload(
        model=arguments.model, size=arguments.size, precision=arguments.precision, steps=arguments.steps
    )
    chosen = {name: partial(SECTIONS[name], workload, arguments.replicas) for name in arguments.section or SECTIONS}
    title = f"{workload.model} {workload.size}, {arguments.replicas} replicas"
    report(title, chosen, arguments.json, workload={**vars(workload), "replicas": arguments.replicas})


def sizes_of(model: str) -> str:
    return f"{model} {', '.join(RECIPES[model])}"


SECTIONS: dict[str, Callable[[Workload, int], tuple[Any, str]]] = {
    "phases": step_phases.measure,
    "arithmetic": step_arithmetic.measure,
    "optimizers": step_optimizers.measure,
    "memory": step_memory.measure,
}

if __name__ == "__main__":
    run_program(main)
