"""Time and memory of a training step by part, with 0/1 Adam and with Adam.

    python benchmarks/step.py --size base --steps 3 --json result.json

Prints Markdown: the phases of a step, the optimizer's arithmetic against torch's fused AdamW, and bytes per parameter.
Linux only, as it reads /proc. README.md explains the columns.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import arithmetic
import family
import memory
import phases
from reporting import report
from workload import RECIPES, Workload

from megatron01.utils.formatting import markdown

NAMES = {"adam": "Adam", "full": "full", "one_bit": "1-bit", "local": "local"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of a training step with 0/1 Adam and with Adam.")
    parser.add_argument("--size", default="debug", help=f"of the model: {sizes_of('gpt2')}; {sizes_of('bert')}")
    parser.add_argument("--model", choices=("gpt2", "bert"), default="gpt2")
    parser.add_argument(
        "--replicas", type=int, default=2, help="processes on this machine, one thread each (default: 2)"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the phases and the memory")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each kind (default: 5)")
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


def measure_phases(workload: Workload, replicas: int) -> tuple[dict[str, Any], str]:
    """Milliseconds of each phase and its share of the step."""
    result = phases.measure(workload, replicas)
    sequences, length = workload.shape
    rows = []
    for kind, entry in result["kinds"].items():
        step, seconds = entry["step_seconds"], entry["seconds"]
        rows.append(
            [
                NAMES[kind],
                *(f"{1e3 * seconds[phase]:.1f} ({seconds[phase] / step:.0%})" for phase in phases.PHASES),
                f"{1e3 * step:.1f}",
                f"{entry['step_ratio']:.2f}",
                f"{entry['optimizer_ratio']:.2f}",
                f"{entry['bytes_sent'] / 1e6:.3g}",
                f"{8 * entry['bytes_sent'] / result['parameters']:.3g}",
            ]
        )
    header = ["step", "forward + backward", "norm", "update", "compression", "communication", "other", "step, ms"]
    header += ["step / Adam", "optimizer / Adam", "MB sent", "bits per parameter"]
    return result, (
        f"## Phases of a step: {result['parameters'] / 1e6:.1f} M parameters, {workload.precision}, "
        f"{sequences} x {length} tokens per replica, ms (share), median over steps and replicas\n\n"
        + markdown([header, *rows])
    )


def measure_arithmetic(workload: Workload, replicas: int) -> tuple[list[dict[str, Any]], str]:
    """Milliseconds of an optimizer step on one replica, and ratios to AdamW."""
    results = arithmetic.measure(workload)
    text = "## Optimizer arithmetic on one replica against torch's fused AdamW (median ratios of pairs)\n"
    for result in results:
        adamw = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in result["adamw_seconds"].items())
        text += f"\n{result['precision']} weights, {result['threads']} thread(s); AdamW: {adamw}\n\n"
        baselines = list(result["adamw_seconds"])
        rows = [
            [
                NAMES[kind],
                f"{1e3 * entry['seconds']:.1f}",
                f"{entry['ratio']:.2f}",
                *(f"{1e3 * entry[key]:.1f}" for key in ("seconds_clipping", "norm_seconds", "update_seconds")),
                *(f"{entry['ratio_clipping'][baseline]:.2f}" for baseline in baselines),
            ]
            for kind, entry in result["kinds"].items()
        ]
        header = ["step", "ms", "/ AdamW alone", "with clipping, ms", "norm", "update"]
        text += markdown([header + [f"/ AdamW {baseline}" for baseline in baselines], *rows])
    return results, text


def measure_family(workload: Workload, replicas: int) -> tuple[dict[str, Any], str]:
    """Milliseconds and bytes of every optimizer's steps without forward and backward pass."""
    result = family.measure(workload)
    rows = [
        [
            name,
            NAMES[kind],
            f"{1e3 * entry['seconds']:.1f}",
            f"{entry['ratio']:.2f}",
            f"{entry['arithmetic_ratio']:.2f}",
            f"{entry['bytes_sent'] / 1e6:.3g}",
        ]
        for name, kinds in result.items()
        for kind, entry in kinds.items()
    ]
    header = ["optimizer", "step", "ms", "/ (fp32 all-reduce + AdamW)", "/ AdamW alone", "MB sent"]
    return result, "## Steps of every optimizer on 2 replicas, without clipping\n\n" + markdown([header, *rows])


def measure_memory(workload: Workload, replicas: int) -> tuple[dict[str, Any], str]:
    """Bytes per parameter by buffer, their sum, and the measured memory of the process."""
    result = memory.measure(workload, replicas)
    parameters, buffers = result["parameters"], result["buffers"]
    state = sum(size for name, size in buffers.items() if name in memory.STATE)
    known = sum(buffers.values())

    def row(name: str, size: float) -> list[str]:
        return [name, f"{size / parameters:.4f}", f"{size / 1e6:.2f}"]

    rows = [row(name.replace("_", " "), size) for name, size in buffers.items()]
    rows += [
        row("**state** (x, v, m, u and both errors)", state),
        row(f"goal for the state, 20 + 4/{replicas}", (20 + 4 / replicas) * parameters),
        row("**sum of all buffers**", known),
        row("**measured: peak above the model and its gradients**", result["resident_peak"]),
        row("measured: after the steps", result["resident_after"]),
        row("peak beyond the buffers", result["resident_peak"] - known),
        row("beside them: weights", result["weights"]),
        row("beside them: gradients", result["gradients"]),
    ]
    padding = result["padded_parameters"] / parameters - 1
    return result, (
        f"## Memory: {parameters / 1e6:.1f} M parameters, {workload.precision}, padding to blocks {padding:.3%}\n\n"
        + markdown([["buffer", "bytes per parameter", "MB"], *rows])
    )


SECTIONS = {
    "phases": measure_phases,
    "arithmetic": measure_arithmetic,
    "family": measure_family,
    "memory": measure_memory,
}

if __name__ == "__main__":
    main()
