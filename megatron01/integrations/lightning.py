"""Lightning's Trainer and Fabric with an optimizer of this package: a strategy for each, in place of ``"ddp"``.

from megatron01.integrations.lightning import CompressedDDP       # Trainer(strategy=CompressedDDP())
from megatron01.integrations.lightning import CompressedFabricDDP  # Fabric(strategy=CompressedFabricDDP())
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from megatron01.errors import UserError
from megatron01.integrations.common import (
    MARKER,
    find_optimizer,
    keep_all_gradients_local,
    leave_replicated,
    load_state,
    marker,
    refuse_scaled_others,
    require_version,
    save_state,
)
from megatron01.optim.base import FlatOptimizer
from megatron01.optim.safety import came_together, keep_gradients_local

require_version("lightning", "2.6", "3")

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy  # noqa: E402 - after the version check
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

_SECONDS_ON_EXCEPTION = 30.0
"""How long a replica that raised an error waits for the others to save a checkpoint on it too."""


def _folder(path: Any) -> Path:
    """The folder beside a checkpoint's file, which may be a link to it, that holds the state of every replica."""
    return Path(f"{os.path.realpath(path)}.replicas")


def _scaler(precision: Any) -> torch.amp.GradScaler | None:
    """The ``GradScaler`` of a precision plugin, which has one for 16-mixed; each replica's scale is its own."""
    return getattr(precision, "scaler", None)


class CompressedDDP(DDPStrategy):
    """DDP strategy for Lightning's Trainer in which gradients stay local, and the optimizer communicates.

    ``configure_optimizers`` returns an optimizer of this package, alone or with a ``ShownSchedule``. Validation and
    saved models use the replicated weights, which the model keeps after training. Beside each checkpoint ``NAME.ckpt``
    the folder ``NAME.ckpt.replicas`` holds the state of every replica; all machines must see it.
    """

    _loaded_from: Any = None  # path of a checkpoint
    _replicated: Any = None  # context of the replicated weights, while it is entered

    @property
    def _ours(self) -> FlatOptimizer | None:
        return next((found for found in map(find_optimizer, self.optimizers) if found is not None), None)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        number = sum(find_optimizer(optimizer) is not None for optimizer in self.optimizers)
        if number > 1:
            raise UserError(
                f"configure_optimizers returned {number} optimizers of megatron01, of which only one would be saved;"
                " expected one"
            )
        refuse_scaled_others(self.optimizers, _scaler(self.precision_plugin))
        plugin: Any = self.precision_plugin

        def clip_gradients(optimizer: Any, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:
            if clip_val > 0 and find_optimizer(optimizer) is not None:
                raise UserError(
                    f"gradient_clip_val is {clip_val}, which would clip each replica's own gradient; give the optimizer"
                    " max_grad_norm instead"
                )
            type(plugin).clip_gradients(plugin, optimizer, clip_val, *args, **kwargs)

        # of Trainer's gradient_clip_val, and of clip_gradients() in a module
        plugin.clip_gradients = clip_gradients

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert self.model is not None
        keep_all_gradients_local(self.model)

    @property
    def _training(self) -> FlatOptimizer | None:
        """The optimizer while ``fit`` runs: later the model may hold the weights of a checkpoint, to be evaluated."""
        assert self.lightning_module is not None
        state = self.lightning_module.trainer.state
        return self._ours if state.fn == "fit" and not state.finished else None

    def _enter(self) -> None:
        if (ours := self._training) is not None and self._replicated is None:
            self._replicated = ours.replicated_weights()
            self._replicated.__enter__()

    def _leave(self) -> None:
        if self._replicated is not None:
            replicated, self._replicated = self._replicated, None
            replicated.__exit__(None, None, None)

    on_validation_start = _enter
    on_validation_end = on_train_start = _leave  # also after an interrupted validation

    def on_train_end(self) -> None:
        """Leave the replicated weights in the model, unless a callback has put others there (averages of weights)."""
        super().on_train_end()
        if (ours := self._training) is not None:
            assert self.lightning_module is not None
            with suppress(UserError):
                leave_replicated(ours, self.lightning_module)

    def _require_all(self, ours: FlatOptimizer) -> None:
        """Raise the error on which a checkpoint is to be saved, unless all replicas save one.

        Saving is collective, and others may wait for this one in an exchange.
        """
        assert self.lightning_module is not None
        error = sys.exception()
        if error is None or not self.lightning_module.trainer.interrupted:
            return
        # one that is half-way through a step has no state to save
        came = (
            0
            if ours._is_half_way
            else came_together(f"on_exception/{ours.step_count}", self.world_size, None, _SECONDS_ON_EXCEPTION)
        )
        if came < self.world_size:
            error.add_note(
                f"No checkpoint is saved on this error, as only {came} of {self.world_size} replicas could: all must"
                " save theirs between the same two steps."
            )
            raise error

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state dict, with the replicated weights while ``fit`` runs."""
        ours = self._training
        if ours is None:
            return super().lightning_module_state_dict()
        self._require_all(ours)
        with ours.replicated_weights():  # copies: ``save_checkpoint`` ends a validation's context
            found = super().lightning_module_state_dict()
            return {k: value.clone() if isinstance(value, torch.Tensor) else value for k, value in found.items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The marker in the checkpoint in place of the state, which ``save_checkpoint`` writes to files beside it."""
        ours = find_optimizer(optimizer)
        return super().optimizer_state(optimizer) if ours is None else marker(ours)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if (ours := self._ours) is not None and "optimizer_states" in checkpoint:
            self._leave()
            save_state(ours, _folder(filepath), _scaler(self.precision_plugin))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_folder(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            ours = find_optimizer(optimizer)
            if ours is not None and MARKER in state:
                load_state(ours, _folder(self._loaded_from), _scaler(self.precision_plugin), of=state)
            else:
                optimizer.load_state_dict(state)


class CompressedFabricDDP(FabricDDPStrategy):
    """DDP strategy for Fabric in which gradients stay local, and the optimizer communicates.

    ``fabric.save`` and ``fabric.load`` keep the state of every replica in the folder ``PATH.replicas``, and the model
    with the replicated weights. Evaluate, and save a model alone, inside ``optimizer.replicated_weights()``; clip by
    the optimizer's ``max_grad_norm``, not by ``fabric.clip_gradients``.
    """

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        return keep_gradients_local(super().setup_module(module))

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        refuse_scaled_others([optimizer], _scaler(self.precision))
        return super().setup_optimizer(optimizer)

    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> Any:
        raise UserError("clip_gradients would clip each replica's own gradient; give the optimizer max_grad_norm")

    clip_gradients_value = clip_gradients_norm

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The marker in the checkpoint in place of the state, which ``save_checkpoint`` writes to files beside it."""
        ours = find_optimizer(optimizer)
        return super().get_optimizer_state(optimizer) if ours is None else marker(ours)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        _, ours = _entry_of_ours(state)
        if ours is None:
            super().save_checkpoint(path, state, *args, **kwargs)
            return
        save_state(ours, _folder(path), _scaler(self.precision))
        with ours.replicated_weights():
            super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        name, ours = _entry_of_ours(state) if isinstance(state, dict) else ("", None)
        if ours is None:
            return super().load_checkpoint(path, state, *args, **kwargs)
        others = {key: value for key, value in state.items() if key != name}
        rest: dict[str, Any] = super().load_checkpoint(path, others, *args, **kwargs)
        state.update(others)
        load_state(ours, _folder(path), _scaler(self.precision), of=rest.pop(name, None))
        return rest


def _entry_of_ours(state: dict[str, Any]) -> tuple[str, FlatOptimizer | None]:
    """Key and optimizer of this package in a checkpoint's contents; ("", None) if there is none."""
    ours = [(key, found) for key, value in state.items() if (found := find_optimizer(value)) is not None]
    if len(ours) > 1:
        raise UserError(f"a checkpoint has {len(ours)} optimizers of megatron01; expected one")
    return ours[0] if ours else ("", None)
