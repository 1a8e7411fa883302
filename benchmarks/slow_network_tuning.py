"""The learning rate of each contestant: the best of a grid with seed 0, by the held-out loss at the end.

The middle of the grid is tried first, then the neighbours of the best so far, until both neighbours of the best are
worse, or the best is at an end of the grid.
"""

from __future__ import annotations

import math
from typing import Any

from convergence_variants import GRID, ROOT_TWO_GRID
from rivals.entries import entry
from slow_network_run import NO_HOSTS

SEED = 0


def grid(size: str) -> tuple[float, ...]:
    """Learning rates to try for a model of this size, with the grid spacing of ``convergence.py``."""
    return ROOT_TWO_GRID if size == "yardstick" else GRID


class Tuning:
    """Held-out losses by learning rate.

    Args:
        lines: of this benchmark's own file.
        convergence: lines of the file of ``convergence.py``, from which runs of the same optimizer are taken, whatever
            the type in which their gradients were sent in full steps.
        setting: task, steps, replicas and size that the runs must have.
    """

    def __init__(self, lines: list[dict[str, Any]], convergence: list[dict[str, Any]], setting: dict[str, Any]) -> None:
        own = [line for line in lines if "run" in line and line["run"]["rate"] == NO_HOSTS]
        self._own = [line for line in own if self._fits(line["run"], setting)]
        flat = [line for line in convergence if "nodes" not in line["run"]]  # flat, like the exchange between the hosts
        self._convergence = [line for line in flat if self._fits(line["run"], setting)]
        self._steps = setting["steps"]
        self.rates = grid(setting["size"])

    @staticmethod
    def _fits(run: dict[str, Any], setting: dict[str, Any]) -> bool:
        return run["seed"] == SEED and all(run[name] == value for name, value in setting.items())

    def losses(self, contestant: str) -> dict[float, float]:
        """Known losses by learning rate; infinite where training diverged."""
        chosen = entry(contestant)
        found: dict[float, float | None] = {}
        if not chosen.tuned_here:
            wanted = (chosen.optimizer, _without_wire(chosen.overrides(self._steps)))
            for line in self._convergence:
                run = line["run"]
                if (run["optimizer"], _without_wire(run["overrides"])) == wanted:
                    found[run["learning_rate"]] = line["held_out_loss"]
        for line in self._own:
            if line["run"]["contestant"] == contestant:
                finished = line["curve"] and line["curve"][-1][0] == self._steps
                found[line["run"]["learning_rate"]] = line["curve"][-1][2] if finished else None
        return {rate: math.inf if found[rate] is None else found[rate] for rate in self.rates if rate in found}  # type: ignore[misc]

    def missing(self, contestant: str) -> list[float]:
        """Learning rates to try next; their results may call for more."""
        losses = self.losses(contestant)
        if not losses:
            return [self.rates[len(self.rates) // 2]]
        best = self.rates.index(min(losses, key=losses.__getitem__))
        return [rate for rate in self.rates[max(0, best - 1) : best + 2] if rate not in losses]

    def best(self, contestant: str) -> float | None:
        """The best learning rate; None before its neighbours have been tried."""
        losses = self.losses(contestant)
        return min(losses, key=losses.__getitem__) if losses and not self.missing(contestant) else None


def _without_wire(overrides: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in overrides.items() if name != "gradient_wire_dtype"}
