"""The optimizers and settings that are compared, by name. Each sets what it varies explicitly: defaults may change."""

from __future__ import annotations

from typing import Any

from megatron01.config.registry import optimizers

Settings = dict[str, Any]
BF16: Settings = {"gradient_wire_dtype": "bf16"}
FOUR_BITS: Settings = {"gradient_wire_dtype": "4bit"}
EIGHT_BITS: Settings = {"gradient_wire_dtype": "8bit"}
FIRST: Settings = {
    **BF16,
    "clip_grad_by": "local",
    "variance_kappa": 16,
    "block_size": 1024,
    "step_bound": 3.0,
    "sync_policy": "schedule",
}
"""0/1 Adam as it first was: clipped by local norms, blocks that several rows of a matrix share."""
MEAN: Settings = {**FIRST, "clip_grad_by": "mean"}
ROWS: Settings = {**MEAN, "block_size": 64}
"""A scale for each row of the embeddings, which are 64 wide."""
BOUND1: Settings = {**MEAN, **FOUR_BITS, "step_bound": 1.0}
CHANGES_OF_BOUND1: dict[str, Settings] = {
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
    "no_bits_every_step": {"sync_policy": "every", "compressor": "none"},
    "rows": {"block_size": 64},
    "bf16": BF16,
    "refreshing": {"variance_freeze_step": 1 << 20},
    "from_2_frozen200": {"sync_policy": "schedule:2", "variance_freeze_step": 200},
    "from_2_frozen200_kappa64": {"sync_policy": "schedule:2", "variance_freeze_step": 200, "variance_kappa": 64},
    # full steps alone until a step, then a second moment that is frozen, as in 1-bit Adam
    **{
        f"from_{first}_dense{until}": {
            "sync_policy": f"schedule:{first}",
            "variance_kappa": 1 << 20,
            "variance_freeze_step": until,
        }
        for first, until in ((2, 150), (2, 200), (2, 300), (4, 200))
    },
}
FROM_4: Settings = {"sync_policy": "schedule:4"}


def variants(steps: int) -> dict[str, tuple[str, Settings]]:
    """Optimizer, and overrides of the recipe, of the variants for runs of ``steps`` steps, by name."""
    one_bit_adam = {**BF16, "freeze_step": max(1, steps * 3 // 20)}
    return {
        # bf16 gradients, unless the type is the optimizer's own
        **{name: (name, {} if spec.ddp or spec.auto_wire else BF16) for name, spec in optimizers().items()},
        **{name: ("zero_one_adam", settings) for name, settings in _zero_one_adam(steps).items()},
        "one_bit_adam_bound1": ("one_bit_adam", {**one_bit_adam, "step_bound": 1.0}),
        "one_bit_adam_bound3": ("one_bit_adam", {**one_bit_adam, "step_bound": 3.0}),
    }


def _zero_one_adam(steps: int) -> dict[str, Settings]:
    found = {"first": FIRST}
    for kappa in (16, 32):
        for name, settings in {
            "mean": MEAN,
            "rows": ROWS,
            "four_bits": {**ROWS, **FOUR_BITS},
            "four_bits_mean": {**MEAN, **FOUR_BITS},
            "eight_bits_mean": {**MEAN, **EIGHT_BITS},
            "four_bits_bound1": BOUND1,
        }.items():
            found[f"{name}_kappa{kappa}"] = {**settings, "variance_kappa": kappa}
    found["rows_kappa64"] = {**ROWS, "variance_kappa": 64}
    found |= {f"bound1_kappa16_{name}": {**BOUND1, **changes} for name, changes in CHANGES_OF_BOUND1.items()}
    found["bound05_kappa16"] = {**BOUND1, "step_bound": 0.5}
    # arithmetic of Adam, except for the bias correction of the momentum
    found["full_steps"] = {**MEAN, "variance_kappa": 1 << 20, "sync_policy": "every", "compressor": "none"}
    # today's defaults, and what differs from them
    found["bert_recipe"] = _refreshed(64, max(1, steps // 10))  # as configs/bert/base.yaml
    for kappa, until in ((32, 300), (64, 120), (64, 300), (64, 400), (128, 400)):
        found[f"kappa{kappa}_frozen{until}"] = _refreshed(kappa, until)
    for size in (64, 256, 4096, 16384):
        found[f"block{size}"] = {**FOUR_BITS, "block_size": size}
    found["bert_recipe_common"] = {**found["bert_recipe"], "local_momentum": "common"}
    found["bert_recipe_rows"] = {**found["bert_recipe"], "block_size": 64}
    found["no_bits"] = {**FOUR_BITS, "compressor": "none"}
    for until in (300, 400):
        found[f"kappa64_frozen{until}_from_4"] = {**_refreshed(64, until), **FROM_4}
    return {
        **found,
        "half": {**FOUR_BITS, "local_scale": 0.5},
        "quarter": {**FOUR_BITS, "local_scale": 0.25},
        "eighth": {**FOUR_BITS, "local_scale": 0.125},
        "common": {**FOUR_BITS, "local_momentum": "common"},
        "common_from_4": {**FOUR_BITS, "local_momentum": "common", **FROM_4},
        "common_delayed": {**FOUR_BITS, "local_momentum": "common", "delay_synchronization": True},
        "delayed": {**FOUR_BITS, "delay_synchronization": True},
        "kappa32": {**FOUR_BITS, "variance_kappa": 32},
        "kappa64": {**FOUR_BITS, "variance_kappa": 64},
        "bf16_state": {**FOUR_BITS, "state_dtype": "bf16"},
        "kappa64_from_4": {**FOUR_BITS, "variance_kappa": 64, **FROM_4},
    }


def _refreshed(kappa: int, until: int) -> Settings:
    """Settings of T_v; ``until``: ``variance_freeze_step``."""
    return {**FOUR_BITS, "variance_kappa": kappa, "variance_freeze_step": until}
