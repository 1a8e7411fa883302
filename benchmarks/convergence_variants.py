"""The optimizers and settings that are compared, by name. Each sets what it varies explicitly: defaults may change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron01.comm.transport import Replica
from megatron01.config.registry import optimizers

GRID = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
"""First learning rates where a sweep goes by doublings."""
ROOT_TWO_GRID = (5e-4, 7.1e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3, 5.7e-3, 8e-3, 1.1e-2)
WIRE = {"gradient_wire_dtype": "bf16"}
FIRST = {
    **WIRE,
    "clip_grad_by": "local",
    "variance_kappa": 16,
    "block_size": 1024,
    "step_bound": 3.0,
    "sync_policy": "schedule",
}
"""0/1 Adam as it first was: clipped by local norms, blocks that several rows of a matrix share."""
MEAN = {**FIRST, "clip_grad_by": "mean"}
ROWS = {**MEAN, "block_size": 64}
"""A scale for each row of the embeddings, which are 64 wide."""


@dataclass(frozen=True)
class Variant:
    """An optimizer with overrides of the recipe, and the topology of its processes; see ``Run``."""

    name: str
    optimizer: str
    overrides: dict[str, Any]
    nodes: int | None = None
    replica: Replica | None = None


def variants(steps: int) -> dict[str, Variant]:
    """The variants for runs of ``steps`` steps, by name."""
    found = [
        Variant(name, name, {} if spec.ddp or spec.auto_wire else WIRE)  # bf16 gradients, unless the type is its own
        for name, spec in optimizers().items()
    ]
    found += [
        _zero_one("first", FIRST),
        _zero_one("first_kappa64", {**FIRST, "variance_kappa": 64}),
        *(_zero_one(f"mean_kappa{kappa}", {**MEAN, "variance_kappa": kappa}) for kappa in (8, 16, 32, 64, 128)),
        *(_zero_one(f"rows_kappa{kappa}", {**ROWS, "variance_kappa": kappa}) for kappa in (16, 32, 64)),
        *(
            _zero_one(f"four_bits_kappa{kappa}", {**ROWS, "variance_kappa": kappa, "gradient_wire_dtype": "4bit"})
            for kappa in (16, 32)
        ),
        *(
            _zero_one(f"{name}_mean_kappa{kappa}", {**MEAN, "variance_kappa": kappa, "gradient_wire_dtype": wire})
            for name, wire in (("four_bits", "4bit"), ("eight_bits", "8bit"))
            for kappa in (16, 32)
        ),
        *(
            _zero_one(
                f"four_bits_bound1_kappa{kappa}",
                {**MEAN, "variance_kappa": kappa, "gradient_wire_dtype": "4bit", "step_bound": 1.0},
            )
            for kappa in (16, 32)
        ),
        *(
            _zero_one(f"bound1_kappa16_{name}", {**MEAN, "gradient_wire_dtype": "4bit", "step_bound": 1.0, **changes})
            for name, changes in {
                "every_step": {"sync_policy": "every"},
                "from_2": {"sync_policy": "schedule:2"},
                "from_4": {"sync_policy": "schedule:4"},
                "from_4_whole": {"sync_policy": "schedule:4", "local_scale": 1.0},
                "from_4_quarter": {"sync_policy": "schedule:4", "local_scale": 0.25},
                "from_4_no_bits": {"sync_policy": "schedule:4", "compressor": "none"},
                "delayed": {"delay_synchronization": True},
                "delayed_whole": {"delay_synchronization": True, "local_scale": 1.0},
                "up_to_128": {"max_sync_interval": 128},
                "up_to_128_whole": {"max_sync_interval": 128, "local_scale": 1.0},
                "no_bits": {"compressor": "none"},
                "rows": {"block_size": 64},
                "bf16": WIRE,
                "refreshing": {"variance_freeze_step": 1 << 20},
                "from_2_frozen200": {"sync_policy": "schedule:2", "variance_freeze_step": 200},
                "from_2_frozen200_kappa64": {
                    "sync_policy": "schedule:2",
                    "variance_freeze_step": 200,
                    "variance_kappa": 64,
                },
                # full steps alone until a step, then a second moment that is frozen, as in 1-bit Adam
                **{
                    f"from_{first}_dense{until}": {
                        "sync_policy": f"schedule:{first}",
                        "variance_kappa": 1 << 20,
                        "variance_freeze_step": until,
                    }
                    for first in (2, 4)
                    for until in (150, 200, 300)
                },
                "no_bits_every_step": {"sync_policy": "every", "compressor": "none"},
            }.items()
        ),
        # today's defaults, and what differs from them
        _zero_one("bert_recipe", _refreshed(64, max(1, steps // 10))),  # as configs/bert/base.yaml
        *(
            _zero_one(f"kappa{kappa}_frozen{until}{name}", _refreshed(kappa, until) | changes)
            for kappa, until in ((32, 300), (64, 120), (64, 300), (64, 400), (128, 400))
            for name, changes in (("", {}), ("_from_4", {"sync_policy": "schedule:4"}))
        ),
        *(_zero_one(f"kappa{kappa}", _refreshed(kappa, None)) for kappa in (32, 64)),
        _zero_one("kappa64_from_4", _refreshed(64, None) | {"sync_policy": "schedule:4"}),
        _zero_one("bound05_kappa16", {**MEAN, "gradient_wire_dtype": "4bit", "step_bound": 0.5}),
        _zero_one("mean_no_bits", {**MEAN, "compressor": "none"}),
        _zero_one("rows_every_step", {**ROWS, "sync_policy": "every"}),
        # arithmetic of Adam, except for the bias correction of the momentum
        _zero_one("full_steps", {**MEAN, "variance_kappa": 1 << 20, "sync_policy": "every", "compressor": "none"}),
        *(
            Variant(f"one_bit_adam{name}", "one_bit_adam", {**WIRE, "freeze_step": max(1, steps * 3 // 20), **changes})
            for name, changes in (
                ("_frozen", {"block_size": 64, "step_bound": 3.0}),
                ("_bound1", {"step_bound": 1.0}),
                ("_bound3", {"step_bound": 3.0}),
            )
        ),
    ]
    return {variant.name: variant for variant in found}


def _refreshed(kappa: int, until: int | None) -> dict[str, Any]:
    """Settings of T_v; ``until``: ``variance_freeze_step``."""
    found: dict[str, Any] = {"gradient_wire_dtype": "4bit", "variance_kappa": kappa}
    return found if until is None else found | {"variance_freeze_step": until}


def _zero_one(name: str, overrides: dict[str, Any]) -> Variant:
    return Variant(name, "zero_one_adam", overrides)
