"""The picture of the README: held-out loss against bytes sent, and against time on a slow link, light and dark.

    python benchmarks/pictures.py

makes docs/pictures/loss_light.svg and loss_dark.svg from the records in results/slow_network.jsonl alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
from slow_network_table import Setting, settings

RATE = "20.5mbit"
NAMES = {
    "ddp_bf16": ("Adam, bf16 all-reduce", "#7f7f7f"),
    "one_bit_adam": ("1-bit Adam", "#1f9e89"),
    "zero_one_adam": ("0/1 Adam", "#e0569c"),
}
THEMES = {"light": ("#24292f", "#d0d7de"), "dark": ("#e6edf3", "#444c56")}
"""Colours of text and of grid lines; the background is the page's."""
ROOT = Path(__file__).parents[1]


def bytes_by_kind(line: dict[str, Any]) -> dict[str, float]:
    """Bytes that one replica sends in a step of each kind; full steps send 16-bit gradients, local ones nothing."""
    replicas, counts = line["run"]["replicas"], {kind: count for kind, (count, _) in line["kinds"].items()}
    full = 2 * (replicas - 1) / replicas * 2 * line["parameters"]
    rest = line["formula_bytes"] - full * counts.get("full", 0)
    return {"full": full, "local": 0.0, "one_bit": rest / counts.get("one_bit", 1)}


def curves(setting: Setting, name: str) -> tuple[list[float], list[float], list[float]]:
    """Megabytes, minutes at ``RATE`` and held-out loss at each evaluation, means over seeds."""
    times = setting.times(name, RATE)
    lines = [line for line in setting.learned if line["run"]["contestant"] == name]
    assert times is not None and lines, name
    sent = bytes_by_kind(lines[0])
    first = lines[0]["curve"]
    megabytes = [sum(count * sent[kind] for kind, count in counts.items()) / 1e6 for *_, counts in first]
    minutes = [mean(curve[i][1] for curve in times.curves) / 60 for i in range(len(first))]
    losses = [mean(curve[i][2] for curve in times.curves) for i in range(len(first))]
    return megabytes, minutes, losses


def main() -> None:
    records = Path(__file__).with_name("results") / "slow_network.jsonl"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    setting = max(settings(lines, (0.05,)), key=lambda one: one.steps)
    shown = {name: curves(setting, name) for name in NAMES}
    folder = ROOT / "docs/pictures"
    folder.mkdir(exist_ok=True)
    for theme, (text, grid) in THEMES.items():
        style = {"text.color": text, "axes.labelcolor": text, "xtick.color": text, "ytick.color": text}
        style |= {"axes.edgecolor": grid, "grid.color": grid, "svg.hashsalt": "megatron01", "font.size": 11}
        with plt.rc_context(style):
            figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
            for name, (megabytes, minutes, losses) in shown.items():
                title, colour = NAMES[name]
                left.plot(megabytes, losses, color=colour, label=title, linewidth=2)
                right.plot(minutes, losses, color=colour, label=title, linewidth=2)
            left.set(xscale="log", xlabel="MB sent by one replica", ylabel="held-out loss")
            right.set(xlabel=f"minutes, {setting.replicas} hosts on links of 20 Mbit/s")
            for axes in (left, right):
                axes.grid(alpha=0.6)
                axes.spines[["top", "right"]].set_visible(False)
            right.legend(frameon=False, labelcolor=text)
            figure.savefig(folder / f"loss_{theme}.svg", transparent=True, metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
