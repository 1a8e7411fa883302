"""Training and evaluation of one fine-tuning run.

Recipe: Devlin et al., "BERT" (NAACL 2019), appendix A.3, and its code: Adam with decoupled weight decay, linear warm-up
from 0 and linear decay to 0, gradients clipped to a norm of 1.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron01.config.commands import FineTuneConfig, GlueConfig, SquadConfig
from megatron01.convert.portable import TokenizerFiles
from megatron01.errors import UserError
from megatron01.finetune.pretrained import Encoded, Head, Pretrained, load_pretrained
from megatron01.finetune.results import Column, Result, Run

Collate = Callable[[Sequence[Any]], dict[str, Tensor]]
"""Makes the keyword arguments of a model, tensors by name, from a batch of examples."""

Progress = Callable[[int, int], None]
"""Called after each step with the number of steps done and the total."""

_STEPS_BETWEEN_CHECKS = 50  # that the loss is finite; each check synchronizes with the GPU
_ESTIMATED_STEPS = 8  # timed steps; the first is warm-up
_EVALUATION = 0.25  # time to evaluate an example, relative to training on it


def _ignore(done: int, total: int) -> None:
    """Default progress callback: does nothing."""


@dataclass(frozen=True)
class Training:
    """Outcome of a training.

    Attributes:
        loss: mean over the last tenth of the steps.
        diverged: True if the loss was NaN or infinite at some step; training then ends early.
    """

    num_steps: int
    loss: float
    diverged: bool


def fine_tune(
    model: nn.Module,
    examples: Sequence[Any],
    collate: Collate,
    config: FineTuneConfig,
    run: Run,
    progress: Progress = _ignore,
) -> Training:
    """Train a model in place.

    The run's seed determines dropout and the order of the examples, which are shuffled anew in each epoch. The last
    batch of an epoch may be smaller.

    Args:
        model: takes the output of ``collate`` as keyword arguments and returns an object with a scalar ``loss``.
    """
    device = next(model.parameters()).device
    num_steps = count_steps(len(examples), run.batch_size, config.epochs)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]  # biases and layer norms
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=run.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_share(step, num_steps, config.warmup_fraction)
    )
    torch.manual_seed(run.seed)
    model.train()
    last_tenth = torch.zeros((), device=device)
    total = torch.zeros((), device=device)
    batches = shuffled_batches(len(examples), run.batch_size, run.seed)
    start_of_last_tenth = num_steps - max(1, num_steps // 10)
    for step in range(num_steps):
        inputs = {name: tensor.to(device) for name, tensor in collate([examples[i] for i in next(batches)]).items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            loss = model(**inputs).loss
        loss.backward()
        if config.clip_grad:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        if step >= start_of_last_tenth:
            last_tenth += loss.detach()
        if ((step + 1) % _STEPS_BETWEEN_CHECKS == 0 or step + 1 == num_steps) and not math.isfinite(total.item()):
            return Training(step + 1, math.inf, True)
        progress(step + 1, num_steps)
    return Training(num_steps, last_tenth.item() / (num_steps - start_of_last_tenth), False)


def count_steps(num_examples: int, batch_size: int, epochs: float) -> int:
    """Total number of training steps."""
    return math.ceil(epochs * math.ceil(num_examples / batch_size))


def lr_share(step: int, num_steps: int, warmup_fraction: float) -> float:
    """Learning rate of step 0, 1, ... as a fraction of its peak: linear warm-up from 0, linear decay to 0."""
    warmup = math.ceil(warmup_fraction * num_steps)
    if step < warmup:
        return step / warmup
    return max(0.0, (num_steps - step) / max(1, num_steps - warmup))


def shuffled_batches(num_examples: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Indices of the examples of each batch, endless; shuffled anew in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_examples, generator=generator).tolist()
        for start in range(0, num_examples, batch_size):
            yield order[start : start + batch_size]


@torch.inference_mode()
def evaluate(
    model: nn.Module, examples: Sequence[Any], collate: Collate, *, batch_size: int, bf16: bool
) -> Iterator[tuple[list[int], Any]]:
    """Evaluate a model without dropout; yields the indices of the examples and the model's outputs for each batch.

    Batches are of examples of similar length.
    """
    device = next(model.parameters()).device
    model.eval()
    order = sorted(range(len(examples)), key=lambda place: len(examples[place]))
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        inputs = {name: tensor.to(device) for name, tensor in collate([examples[i] for i in places]).items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            outputs = model(**inputs)
        yield places, outputs


class FineTuneBench(ABC):
    """Executes the runs of a sweep. The model is read at construction.

    Raises:
        UserError: if a package that fine-tuning needs is not installed, or the model cannot be used.
    """

    head: ClassVar[Head]
    config: GlueConfig | SquadConfig

    def __init__(self, config: GlueConfig | SquadConfig, device: torch.device) -> None:
        for package in ("scipy", "sklearn", "transformers"):
            if find_spec(package) is None:
                raise UserError(
                    f"fine-tuning needs {package}, which is not installed; pip install 'megatron01[finetune]'"
                )
        self.config = config
        self._device = device
        self.pretrained = self._load(config.load)

    @abstractmethod
    def columns(self, task: str) -> Sequence[Column]:
        """Columns of the table of results; metrics of a diverged run are 0."""

    @abstractmethod
    def fingerprint(self, task: str) -> str:
        """Hash of the examples."""

    @abstractmethod
    def training_set(self, task: str) -> Sequence[Any]:
        """The training examples."""

    @abstractmethod
    def collate(self, task: str, examples: Sequence[Any]) -> dict[str, Tensor]:
        """The keyword arguments of a model for a batch, with its labels."""

    @abstractmethod
    def score(self, run: Run, model: Any) -> dict[str, float]:
        """The metrics on the development sets, by name; 1 is best."""

    @abstractmethod
    def amounts(self, task: str) -> tuple[float, float]:
        """Relative amounts of data, comparable between tasks: trained on per epoch, and evaluated at the end."""

    def num_outputs(self, task: str) -> int:
        """Number of outputs of the head."""
        return 2

    def source(self, task: str) -> Pretrained:
        """The pretrained model that runs of a task start from."""
        return self.pretrained

    def new_model(self, run: Run) -> Any:
        """A new transformers model for a run, on the device."""
        model = self.source(run.task).new_model(
            num_outputs=self.num_outputs(run.task), seed=run.seed, dropout=self.config.dropout
        )
        return model.to(self._device)

    def estimate(self, runs: Sequence[Run]) -> float:
        """Estimated seconds for ``runs`` one after the other, extrapolated from some steps of the first."""
        first = runs[0]
        training_set = self.training_set(first.task)
        examples = training_set[: _ESTIMATED_STEPS * first.batch_size]
        ends: list[float] = []
        fine_tune(
            self.new_model(first), examples, partial(self.collate, first.task), replace(self.config, epochs=1.0), first,
            progress=lambda *_: ends.append(time.monotonic()),
        )  # fmt: skip
        if len(ends) < 2:
            return 0.0
        of_an_example = (ends[-1] - ends[0]) / max(1, len(examples) - first.batch_size)
        amounts = {task: self.amounts(task) for task in {run.task for run in runs}}
        of_a_unit = of_an_example * len(training_set) / max(1.0, amounts[first.task][0])
        units = 0.0
        for run in runs:
            trained, evaluated = amounts[run.task]
            units += self.config.epochs * trained + _EVALUATION * evaluated
        return of_a_unit * units

    def measure(self, run: Run, progress: Progress = _ignore) -> Result:
        """Train a model and evaluate it on the development sets."""
        start = time.monotonic()
        model, training = self.train(run, progress)
        metrics = {column.metric: 0.0 for column in self.columns(run.task)}
        if not training.diverged:
            metrics |= self.score(run, model)
        return Result(
            run=run,
            data=self.fingerprint(run.task),
            metrics=metrics,
            num_steps=training.num_steps,
            loss=None if training.diverged else training.loss,
            diverged=training.diverged,
            seconds=round(time.monotonic() - start, 3),
        )

    def train(self, run: Run, progress: Progress = _ignore) -> tuple[Any, Training]:
        """Train the model of a run; returns it (a transformers model) and the outcome."""
        model, collate = self.new_model(run), partial(self.collate, run.task)
        return model, fine_tune(model, self.training_set(run.task), collate, self.config, run, progress)

    def save(self, model: Any, task: str) -> None:
        """Write a trained model and its tokenizer below ``models/``, as a folder of transformers."""
        folder = self.config.output / "models" / task
        self.source(task).save(model, folder)
        print(f"wrote {folder}")

    def _load(self, load: str) -> Pretrained:
        config = self.config
        pretrained = load_pretrained(load, TokenizerFiles.given(config), self.head)
        if config.max_length > pretrained.max_length:
            raise UserError(
                f"max_length is {config.max_length}; {pretrained.source} has {pretrained.max_length} positions"
            )
        return pretrained

    def _outputs(self, model: Any, task: str, examples: Sequence[Encoded]) -> Iterator[tuple[list[int], Any]]:
        """As ``evaluate``: indices of the examples and outputs of each batch."""
        config, encoder = self.config, self.source(task).encoder
        return evaluate(
            model, examples, encoder.collate, batch_size=config.eval_batch_size, bf16=config.precision == "bf16"
        )
