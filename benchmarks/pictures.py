"""The picture of the README: held-out loss against bytes sent, and against time on a slow link, light and dark.

    python benchmarks/pictures.py

makes docs/pictures/loss_light.svg and loss_dark.svg from committed records alone: bytes from results/convergence.jsonl
(the present default and the former one, beside Adam), times from results/slow_network.jsonl (the default of then). The
records of the first hold the bytes of whole runs; when they were sent follows from the settings.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt
import numpy as np
from convergence_run import Run, build_config
from convergence_table import read_records
from slow_network_table import Setting, settings

from megatron01.cost.volume import Wire, traffic

RATE = "20.5mbit"
GREY, GREEN, PINK, LIGHT_PINK = "#7f7f7f", "#1f9e89", "#e0569c", "#f2a8cb"
BY_BYTES = {
    "adam": ("Adam, 16-bit gradients", GREY),
    "mean_kappa16": ("0/1 Adam, 16-bit full steps", LIGHT_PINK),
    "four_bits_mean_kappa32": ("0/1 Adam, 4-bit full steps (default)", PINK),
}
BY_TIME = {
    "ddp_bf16": ("Adam, 16-bit gradients", GREY),
    "one_bit_adam": ("1-bit Adam", GREEN),
    "zero_one_adam": ("0/1 Adam, 16-bit full steps", LIGHT_PINK),
}
THEMES = {"light": ("#24292f", "#d0d7de"), "dark": ("#e6edf3", "#444c56")}
"""Colours of text and of grid lines; the background is the page's."""
ROOT, RECORDS = Path(__file__).parents[1], Path(__file__).with_name("results")


def losses_by_bytes(name: str) -> tuple[list[float], list[float]]:
    """Megabytes that one replica has sent at each evaluation of a variant, and held-out loss; means over its seeds.

    All runs are of the learning rate and the task of the first record.
    """
    records = [one for one in read_records(RECORDS / "convergence.jsonl") if one["name"] == name]
    assert records, name
    first = records[0]
    records = [one for one in records if one["run"] | {"seed": 0} == first["run"] | {"seed": 0}]
    run, wire = Run(**first["run"]), Wire(parameter_sizes=(first["parameters"],), replicas=4, block_size=1024)
    assert run.replicas == wire.replicas
    if run.optimizer == "adam":  # sends the same at each step, 16 bits an element
        sent = np.full(run.steps, float(wire.ring(2)))
    else:
        config = build_config(replace(run, size="small"), Path()).optimizer
        predicted = traffic(config, train_iters=run.steps, precision="fp32", wire=wire)
        assert predicted.total_rounds == first["rounds"], name
        total = first["bits_per_parameter"] / 8 * first["parameters"] * run.steps
        sent = predicted.bytes_sent * (total / predicted.total_bytes)  # with padding and headers, as counted
    megabytes = [float(np.cumsum(sent)[step - 1]) / 1e6 for step, _ in first["curve"]]
    return megabytes, [mean(one["curve"][i][1] for one in records) for i in range(len(megabytes))]


def losses_by_time(setting: Setting, name: str) -> tuple[list[float], list[float]]:
    """Minutes at ``RATE`` at each evaluation, and held-out loss; means over seeds."""
    times = setting.times(name, RATE)
    assert times is not None, name
    places = range(len(times.curves[0]))
    return (
        [mean(curve[i][1] for curve in times.curves) / 60 for i in places],
        [mean(curve[i][2] for curve in times.curves) for i in places],
    )


def main() -> None:
    lines = [json.loads(line) for line in (RECORDS / "slow_network.jsonl").read_text().splitlines()]
    setting = max(settings(lines, (0.05,)), key=lambda one: one.steps)
    folder = ROOT / "docs/pictures"
    folder.mkdir(exist_ok=True)
    for theme, (text, grid) in THEMES.items():
        style = {"text.color": text, "axes.labelcolor": text, "xtick.color": text, "ytick.color": text}
        style |= {"axes.edgecolor": grid, "grid.color": grid, "svg.hashsalt": "megatron01", "font.size": 11}
        with plt.rc_context(style):
            figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
            for name, (title, colour) in BY_BYTES.items():
                left.plot(*losses_by_bytes(name), color=colour, label=title, linewidth=2)
            for name, (title, colour) in BY_TIME.items():
                right.plot(*losses_by_time(setting, name), color=colour, label=title, linewidth=2)
            left.set(xscale="log", xlabel="MB sent by one replica", ylabel="held-out loss")
            right.set(xlabel=f"minutes, {setting.replicas} hosts on links of 20 Mbit/s", ylabel="held-out loss")
            for axes in (left, right):
                axes.grid(alpha=0.6)
                axes.spines[["top", "right"]].set_visible(False)
            left.set_xticks(ticks := [20, 50, 100, 200, 500], list(map(str, ticks)))
            left.set_xticks([], minor=True)
            lines_of = {line.get_label(): line for axes in (left, right) for line in axes.get_lines()}
            titles = list(dict.fromkeys(title for title, _ in (*BY_TIME.values(), *BY_BYTES.values())))
            handles = [lines_of[title] for title in titles]
            figure.legend(handles, titles, loc="outside lower center", ncols=4, frameon=False, labelcolor=text)
            figure.savefig(folder / f"loss_{theme}.svg", transparent=True, metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
