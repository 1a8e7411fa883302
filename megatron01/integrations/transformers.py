"""transformers' Trainer with an optimizer of this package.

from megatron01.integrations.transformers import CompressedTrainer

trainer = CompressedTrainer(model=model, args=args, train_dataset=data)
trainer.train()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from megatron01.errors import UserError
from megatron01.integrations.common import (
    ShownSchedule,
    find_optimizer,
    keep_all_gradients_local,
    leave_replicated,
    load_state,
    require_version,
    save_state,
)
from megatron01.optim.base import FlatOptimizer
from megatron01.optim.schedule import TabulatedSchedule
from megatron01.optim.zero_one_adam import ZeroOneAdam

require_version("transformers", "5.23", "6")

import transformers  # noqa: E402 - after the version check, whose error is clearer than a failed import
from transformers.optimization import get_scheduler  # noqa: E402


class CompressedTrainerMixin:
    """Mixin for Trainer classes: ``class MyTrainer(CompressedTrainerMixin, SFTTrainer)``; see ``CompressedTrainer``.

    Learning rate, schedule, betas, eps, weight decay, clipping, gradient accumulation and precision are those of
    ``TrainingArguments``; ``optim`` is not used. Each ``train()`` builds an optimizer, for its own number of steps.
    Evaluation and saved models use the replicated weights, which the model keeps after training. Each checkpoint
    holds the state of every replica, in a folder that all machines must see.

    Args:
        compressed_optimizer: class of the optimizer.
        compressed_arguments: further arguments for it, such as ``max_sync_interval``.
    """

    def __init__(
        self,
        *args: Any,
        compressed_optimizer: type[FlatOptimizer] = ZeroOneAdam,
        compressed_arguments: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not (isinstance(compressed_optimizer, type) and issubclass(compressed_optimizer, FlatOptimizer)):
            raise UserError(
                f"compressed_optimizer is {compressed_optimizer!r}; expected a class such as megatron01.ZeroOneAdam,"
                " any of megatron01.optim but Adam"
            )
        if not isinstance(compressed_arguments, dict | None):
            raise UserError(
                f"compressed_arguments is {compressed_arguments!r}; expected a dict such as {{'max_sync_interval': 16}}"
            )
        for name in ("schedule", "weight_decay"):
            if name in (compressed_arguments or {}):
                raise UserError(f"compressed_arguments has {name}, which TrainingArguments gives; set it there")
        self._compressed_class, self._compressed_arguments = compressed_optimizer, dict(compressed_arguments or {})
        self._num_training_steps: int | None = None
        self._built_optimizer = False
        self._is_cast = False  # the model, by an evaluation in 16 bit
        self._is_trained = False
        super().__init__(*args, **kwargs)
        if self.lr_scheduler is not None:
            raise UserError("optimizers gives the Trainer a scheduler; expected (optimizer, None): it follows its own")
        if self.optimizer is not None and find_optimizer(self.optimizer) is None:
            raise UserError(
                f"optimizers gives the Trainer a {type(self.optimizer).__name__}; expected one of megatron01's, or none"
            )
        if self.optimizer_cls_and_kwargs is not None:
            raise UserError(
                f"optimizer_cls_and_kwargs gives the Trainer a {self.optimizer_cls_and_kwargs[0].__name__}; expected"
                " compressed_optimizer, and compressed_arguments, in its place"
            )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise UserError("the Trainer uses DeepSpeed or FSDP, which exchange gradients; expected neither")

    # Training.

    @property
    def _ours(self) -> FlatOptimizer | None:
        return find_optimizer(self.optimizer)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._num_training_steps = max_steps
        self._is_cast = self._is_trained = False
        if self._built_optimizer:  # by an earlier train(), whose schedule has ended
            self.optimizer: Any = None
        model, train_dataloader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        keep_all_gradients_local(model)
        return model, train_dataloader

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer, with the settings of ``TrainingArguments``."""
        if self.optimizer is not None:
            return self.optimizer
        args, steps = self.args, self._num_training_steps
        if steps is None:
            raise UserError("the optimizer depends on the number of steps; call train() instead of create_optimizer()")
        model = self.model if model is None else model
        decayed = set(self.get_decay_parameter_names(model))
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        groups = [
            {"params": [pair for pair in named if pair[0] in decayed], "weight_decay": args.weight_decay},
            {"params": [pair for pair in named if pair[0] not in decayed], "weight_decay": 0.0},
        ]
        settings: dict[str, Any] = {"max_grad_norm": args.max_grad_norm or None}
        if "betas" in self._compressed_class.__init__.__annotations__:
            settings |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}

        def make(stand_in: torch.optim.Optimizer) -> Any:
            return get_scheduler(
                args.lr_scheduler_type,
                optimizer=stand_in,
                num_warmup_steps=args.get_warmup_steps(steps),
                num_training_steps=steps,
                scheduler_specific_kwargs=args.lr_scheduler_kwargs,
            )

        schedule = TabulatedSchedule.from_torch(make, base_lr=args.learning_rate, total_steps=steps)
        kind, arguments = self._compressed_class, settings | self._compressed_arguments
        self.optimizer = kind([group for group in groups if group["params"]], schedule, **arguments)
        self._built_optimizer = True
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """A read-only scheduler that shows the learning rate of the optimizer."""
        if self.lr_scheduler is None:
            self.lr_scheduler = ShownSchedule(self.optimizer if optimizer is None else optimizer)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # The optimizer clips by the norm of the mean gradient, and that norm is logged.

    def _clip_grad_norm(self, model: Any) -> None:
        return None

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        return None

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        ours = self._ours
        if ours is not None and ours.last_step is not None and self.control.should_log:
            grad_norm = ours.last_step.grad_norm
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    # Replicated weights.

    @contextmanager
    def _replicated(self) -> Iterator[None]:
        ours = self._ours
        with nullcontext() if ours is None or self._is_cast else ours.replicated_weights():
            yield
        if ours is not None and self._is_trained and not self._is_cast:
            leave_replicated(ours, self.model)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        if not self.is_in_train and (self.args.fp16_full_eval or self.args.bf16_full_eval):
            self._is_cast = True  # the model now has copies of the replicated weights in place of the optimizer's
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._replicated():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._replicated():
            return super().predict(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        with self._replicated():
            super().save_model(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Leave the replicated weights in the model, before callbacks see it and the best weights replace them."""
        if (ours := self._ours) is not None:
            leave_replicated(ours, self.model)
            self._is_trained = True
        return super()._finalize_training(*args, **kwargs)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if (ours := self._ours) is not None:
            ours.reload_weights()

    # State of every replica.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        ours = self._ours
        assert ours is not None
        save_state(ours, output_dir, self.accelerator.scaler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        ours = self._ours
        if checkpoint is not None and ours is not None:
            load_state(ours, checkpoint, self.accelerator.scaler)

    def _save_scaler(self, output_dir: str) -> None:
        """Does nothing: each replica's loss scale is saved with its optimizer state."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Does nothing: the loss scale is loaded with the optimizer state."""


class CompressedTrainer(CompressedTrainerMixin, transformers.Trainer):
    """transformers' Trainer whose replicas exchange about one bit per parameter; see ``CompressedTrainerMixin``."""
