"""The optimizers that are compared, and named sets of settings in which 0/1 Adam is varied (ablations)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

from megatron01.comm.topology import Replica
from megatron01.config.registry import OPTIMIZERS

# As the whole parameter is one block; enough for the word embeddings of the small models (5120 x 64).
WHOLE_TENSOR = 1 << 19
# Full gradients at every step. Its arithmetic is Adam's, but it does not correct the bias of the momentum.
FLAT_ADAM = {"sync_policy": "every", "variance_kappa": 1 << 20, "compressor": "none"}
GRIDS = {"sgdm": (0.05, 0.1, 0.2, 0.4, 0.8)}
"""First learning rates of optimizers whose step is not about the learning rate long."""
GRID = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)


@dataclass(frozen=True)
class Variant:
    """An optimizer with settings that differ from the recipe's, and the arrangement of its processes; see ``Run``."""

    name: str
    optimizer: str
    overrides: dict[str, Any]
    nodes: int | None = None
    replica: Replica | None = None


def optimizers() -> dict[str, Variant]:
    """All that the library has, and Adam whose moments start biased towards 0."""
    variants = {name: Variant(name, name, {}) for name in OPTIMIZERS}
    biased = Variant("adam_biased", "zero_one_adam", {**FLAT_ADAM, "variance_bias_correction": False})
    return variants | {biased.name: biased}


def ablations(steps: int) -> dict[str, list[Variant]]:
    """Settings of 0/1 Adam by the name of the question they answer; ``steps`` is the length of a run."""
    # reaches an interval of 16 a third of the way and one of 128 at half of it
    doubling = {"sync_policy": f"doubling:{steps // 5},{max(1, steps // 25)}"}
    return {
        "adam": [
            Variant("adam_biased", "zero_one_adam", {**FLAT_ADAM, "variance_bias_correction": False}),
            _zero_one("only the momentum biased", FLAT_ADAM),
        ],
        "block_size": [
            _zero_one("blocks of 128", {"block_size": 128}),
            _zero_one("blocks of 1024", {"block_size": 1024}),
            _zero_one("one scale per tensor", {"block_size": WHOLE_TENSOR}),
        ],
        "second_moment": [
            _zero_one("no bias correction", {"variance_bias_correction": False}),
            _zero_one("decay per refresh", {"variance_decay": "per_refresh"}),
            _zero_one("as published", {"variance_decay": "per_refresh", "variance_bias_correction": False}),
            *_each("variance_decay_floor", (0.5, 0.8, 0.95, 0.99)),
        ],
        "freeze_step": [  # 15 % of the run, the published share of the warm-up of 1-bit Adam
            Variant(f"one_bit_adam, frozen at step {steps * 3 // 20}", "one_bit_adam", {"freeze_step": steps * 3 // 20})
        ],
        "kappa": _each("variance_kappa", (4, 8, 32, 64)),
        "local_steps": [_zero_one("no local steps", {"sync_policy": "every"})],
        "max_sync_interval": _each("max_sync_interval", (4, 32, 64, 128)),
        "compressor": [
            _zero_one("no compression", {"compressor": "none"}),
            _zero_one("no compression, no local steps", {"compressor": "none", "sync_policy": "every"}),
        ],
        "dead_threshold": _each("dead_threshold", (0.0, 1e-3, 1e-2, 0.1)),
        "step_bound": [_zero_one("no step_bound", {"step_bound": None}), *_each("step_bound", (1.0, 10.0))],
        "state_dtype": [_zero_one("all state but the master weights in bf16", {"state_dtype": "bf16"})],
        "delay": [_zero_one("synchronization delayed by a step", {"delay_synchronization": True})],
        "replica": [
            Variant(f"2 nodes, a {replica} as the replica", "zero_one_adam", {}, 2, replica)
            for replica in get_args(Replica)
        ],
        "beyond16": [
            _zero_one(f"half of the run at intervals of {longest}", {**doubling, "max_sync_interval": longest})
            for longest in (16, 32, 64, 128)
        ],
    }


def learning_rates(optimizer: str) -> tuple[float, ...]:
    """Where the sweep of an optimizer starts; each is twice the one before."""
    return GRIDS.get(optimizer, GRID)


def _zero_one(name: str, overrides: dict[str, Any]) -> Variant:
    return Variant(name, "zero_one_adam", overrides)


def _each(setting: str, values: Iterable[Any]) -> list[Variant]:
    return [_zero_one(f"{setting} {value:g}", {setting: value}) for value in values]
