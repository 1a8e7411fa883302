"""Optimizer arithmetic on one replica against torch's fused AdamW, measured in turn on the same parameters."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any

import torch
from replica_pool import run_replicas
from timing import Stopwatch, seconds_of, time_flat_optimizer
from torch import nn
from workload import KINDS, TITLES, Workload, new_optimizer

from megatron01.config import Precision
from megatron01.optim import weight_decay_groups
from megatron01.utils.formatting import markdown

MAX_NORM = 1.0
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
THREADS = (1, 2)


def measure(workload: Workload, _: int) -> tuple[list[dict[str, Any]], str]:
    """For each precision and number of threads: median seconds of AdamW and of this library's steps, and paired ratios.

    Returns them and their tables. Replicas do not matter: it is measured on one.

    AdamW is measured as ``alone``, ``clip`` (with ``clip_grad_norm_``) and, for 16-bit weights, ``cast`` (with clipping
    and all that 16-bit weights need: fp32 copies of their gradients and the cast of the master weights). ``norm`` and
    ``update`` are the parts of this library's step with clipping.
    """
    results = run_replicas(_measure_all, 1, workload)[0]
    return results, "".join(
        ["## Optimizer arithmetic on one replica against torch's fused AdamW (median ratios of pairs)\n"]
        + [_table(result) for result in results]
    )


def _table(result: dict[str, Any]) -> str:
    """Milliseconds of an optimizer step, and ratios to AdamW."""
    baselines = list(result["adamw_seconds"])
    adamw = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in result["adamw_seconds"].items())
    rows = [
        [
            TITLES[kind],
            f"{1e3 * entry['seconds']:.1f}",
            f"{entry['ratio']:.2f}",
            *(f"{1e3 * entry[key]:.1f}" for key in ("seconds_clipping", "norm_seconds", "update_seconds")),
            *(f"{entry['ratio_clipping'][baseline]:.2f}" for baseline in baselines),
        ]
        for kind, entry in result["kinds"].items()
    ]
    header = ["step", "ms", "/ AdamW alone", "with clipping, ms", "norm", "update"]
    header += [f"/ AdamW {baseline}" for baseline in baselines]
    title = f"\n{result['precision']} weights, {result['threads']} thread(s); AdamW: {adamw}\n\n"
    return title + markdown([header, *rows])


def _measure_all(workload: Workload) -> list[dict[str, Any]]:
    results = []
    for precision, threads in product(PRECISIONS, THREADS):
        torch.set_num_threads(threads)
        results.append(_measure(dataclasses.replace(workload, precision=precision)))
    return results


def _measure(workload: Workload) -> dict[str, Any]:
    model = workload.build_model()
    workload.set_random_gradients(model, norm=2.0 * MAX_NORM)
    baselines = _adamw_variants(model)
    stopwatch = Stopwatch()
    ours: dict[bool, Any] = {}
    for clipping in (True, False):
        config = workload.config(clip_grad=MAX_NORM if clipping else 0.0)
        # an optimizer turns the model's weights into views of its flat buffers, so each optimizer needs its own model
        own = copy.deepcopy(model)
        for parameter, given in zip(own.parameters(), model.parameters(), strict=True):
            parameter.grad = None if given.grad is None else given.grad.clone()
        ours[clipping] = new_optimizer(own, config, None)
        time_flat_optimizer(ours[clipping], stopwatch)

    rounds: list[dict[str, Any]] = []
    for kind, is_measured in zip(workload.kinds(), workload.measured(), strict=True):
        seconds: dict[str, float] = {}
        parts: dict[str, float] = {}
        # alternate with AdamW, so that other load on the machine affects both
        for clipping, names in ((False, ("alone",)), (True, tuple(name for name in baselines if name != "alone"))):
            for name in names:
                seconds[name] = seconds_of(baselines[name])
            stopwatch.read()
            seconds[f"ours_clipping_{clipping}"] = seconds_of(ours[clipping].step)
            parts = stopwatch.read()
            report = ours[clipping].last_step
            assert report is not None and report.kind == kind, (report, kind)
        if is_measured:
            rounds.append({"kind": kind, "seconds": seconds, "parts": parts})
    return {
        "precision": workload.precision,
        "threads": torch.get_num_threads(),
        "adamw_seconds": {name: median(r["seconds"][name] for r in rounds) for name in baselines},
        "kinds": {kind: _summary([r for r in rounds if r["kind"] == kind], list(baselines)) for kind in KINDS},
    }


def _summary(rounds: list[dict[str, Any]], baselines: list[str]) -> dict[str, Any]:
    def ratio(clipping: bool, baseline: str) -> float:
        return float(median(r["seconds"][f"ours_clipping_{clipping}"] / r["seconds"][baseline] for r in rounds))

    return {
        "seconds": median(r["seconds"]["ours_clipping_False"] for r in rounds),
        "seconds_clipping": median(r["seconds"]["ours_clipping_True"] for r in rounds),
        "norm_seconds": median(r["parts"]["norm"] for r in rounds),
        "update_seconds": median(r["parts"]["update"] for r in rounds),
        "ratio": ratio(False, "alone"),
        "ratio_clipping": {baseline: ratio(True, baseline) for baseline in baselines},
    }


def _adamw_variants(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """What Adam does after the backward pass, by name; 16-bit weights get fp32 masters with fp32 gradients."""
    weights: list[torch.Tensor] = list(model.parameters())
    masters = {
        weight: weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float()) for weight in weights
    }
    groups = [
        {"params": [masters[weight] for _, weight in group["params"]], "weight_decay": group["weight_decay"]}
        for group in weight_decay_groups(model, 0.01)
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    parameters: list[torch.Tensor] = list(masters.values())

    def set_gradients() -> None:
        for weight, master in masters.items():
            assert weight.grad is not None
            master.grad = weight.grad.float()

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=True)
        adamw.step()

    def cast() -> None:
        set_gradients()
        clip()
        with torch.no_grad():
            torch._foreach_copy_(weights, parameters)

    if weights[0].dtype == torch.float32:
        return {"alone": adamw.step, "clip": clip}
    set_gradients()
    return {"alone": adamw.step, "clip": clip, "cast": cast}
