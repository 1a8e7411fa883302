"""accelerate with an optimizer of this package.

from megatron01.integrations.accelerate import prepare

model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron01.errors import UserError
from megatron01.integrations.common import (
    MARKER,
    find_optimizer,
    keep_all_gradients_local,
    load_state,
    marker,
    refuse_scaled_others,
    require_version,
    save_state,
)
from megatron01.optim.base import FlatOptimizer

require_version("accelerate", "1.15", "2")

_FOLDER = "replicas"
_EXCHANGING = ("DEEPSPEED", "FSDP", "MEGATRON_LM")  # values of accelerate's DistributedType


def prepare(accelerator: Any, *objects: Any) -> Any:
    """``accelerator.prepare`` for a model, an optimizer of this package and other objects; returns them in order.

    Its gradients stay local (no all-reduce); those of other optimizers are averaged. ``accelerator.save_state`` and
    ``load_state`` save and load its state of every replica, in a folder that all machines must see. They,
    ``save_model`` and ``get_state_dict`` use the replicated weights.
    ``accelerator.clip_grad_norm_`` is refused: give the optimizer ``max_grad_norm``.
    """
    found = [find_optimizer(value) for value in objects]
    ours = [optimizer for optimizer in found if optimizer is not None]
    if len(ours) != 1:
        raise UserError(f"prepare got {len(ours)} optimizers of megatron01; expected one")
    if any(map(find_optimizer, accelerator._optimizers)):
        raise UserError(
            "this accelerator has an optimizer of megatron01 already, whose saved state this one's would replace;"
            " expected one for each Accelerator, prepared once"
        )
    if (kind := accelerator.distributed_type) in _EXCHANGING:
        raise UserError(
            f"this accelerator uses {kind.value}, which exchanges gradients; expected one that keeps the model whole on"
            " each replica (in the file of accelerate config: distributed_type MULTI_GPU)"
        )
    refuse_scaled_others(objects, accelerator.scaler)
    prepared = accelerator.prepare(*objects)
    results = prepared if isinstance(prepared, tuple) else (prepared,)
    for value in results:
        if hasattr(value, "modules"):
            keep_all_gradients_local(value)
    handles = _save_states_of_replicas(accelerator, results[found.index(ours[0])], ours[0])

    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("accelerator would clip each replica's own gradient; give the optimizer max_grad_norm instead")

    accelerator.clip_grad_norm_ = accelerator.clip_grad_value_ = refuse

    def get_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        # copies: after the context the model holds this replica's own weights again
        with ours[0].replicated_weights():
            state = type(accelerator).get_state_dict(accelerator, *args, **kwargs)
            return {name: value.clone() if hasattr(value, "clone") else value for name, value in state.items()}

    def free_memory(*args: Any) -> Any:
        # what was added here would keep the optimizer alive
        for handle in handles:
            handle.remove()
        for name in ("clip_grad_norm_", "clip_grad_value_", "get_state_dict", "free_memory"):
            vars(accelerator).pop(name)
        for name in ("state_dict", "load_state_dict") if accelerator.scaler is not None else ():
            vars(accelerator.scaler).pop(name)
        return accelerator.free_memory(*args)

    accelerator.get_state_dict, accelerator.free_memory = get_state_dict, free_memory
    return prepared


def _save_states_of_replicas(accelerator: Any, prepared: Any, optimizer: FlatOptimizer) -> list[Any]:
    """Make ``accelerator`` save markers in place of the states of the optimizer and of a ``GradScaler`` for fp16.

    Both are saved in one file per replica: accelerate would let all replicas write their loss scales to the same file.
    Returns handles of the hooks that do it.
    """
    scaler = accelerator.scaler
    holders: list[Any] = []
    to_mark: list[Any] = []
    folder = ""

    def mark(holder: Any, load: Callable[[dict[str, Any]], None]) -> None:
        """Make ``holder.state_dict`` return a marker once after each ``before_saving``; loading it calls ``load``."""
        own_state, own_load = holder.state_dict, holder.load_state_dict

        def state_dict() -> dict[str, Any]:
            if holder not in to_mark:
                return own_state()
            to_mark.remove(holder)
            return marker(optimizer)

        def load_state_dict(state: dict[str, Any]) -> None:
            if MARKER in state:
                load(state)
            else:
                own_load(state)

        holder.state_dict, holder.load_state_dict = state_dict, load_state_dict
        holders.append(holder)

    def before_saving(models: list[Any], weights: list[dict[str, Any]], to: str) -> None:
        save_state(optimizer, f"{to}/{_FOLDER}", scaler)
        to_mark[:] = holders

    def before_loading(models: list[Any], of: str) -> None:
        nonlocal folder
        folder = of  # which ``load_state_dict`` is not told

    mark(prepared, lambda state: load_state(optimizer, f"{folder}/{_FOLDER}", scaler, of=state))
    if scaler is not None:
        mark(scaler, lambda _: None)  # loaded with the optimizer's state
    return [
        accelerator.register_save_state_pre_hook(before_saving),
        accelerator.register_load_state_pre_hook(before_loading),
    ]
