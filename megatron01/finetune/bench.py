"""Training and evaluation of one fine-tuning run.

Recipe: Devlin et al., "BERT" (NAACL 2019), appendix A.3, and its code: Adam with decoupled weight decay, linear warm-up
from 0 and linear decay to 0, gradients clipped to a norm of 1.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from megatron01.config.commands import FineTuneConfig, GlueConfig, SquadConfig
from megatron01.data.tokenizers import TokenizerFiles
from megatron01.errors import UserError
from megatron01.finetune.pretrained import Head, Pretrained, load_pretrained
from megatron01.finetune.results import Column, Result, Run
from megatron01.utils.precision import is_finite

Collate = Callable[[Sequence[Any]], dict[str, Tensor]]
"""Makes the keyword arguments of a model, tensors by name, from a batch of examples."""

StepCallback = Callable[[Run, int, int], None]
"""Called after each step with the run, its number of steps done, and the total."""

_STEPS_BETWEEN_CHECKS = 50  # that the loss is finite; each check synchronizes with the GPU
_ESTIMATED_STEPS = 8  # timed steps; the first is warm-up
_EVALUATION_COST = 0.25  # time to evaluate an example, relative to training on it


class Training(NamedTuple):
    """Outcome of a training."""

    num_steps: int
    loss: float | None  # mean over the last tenth of the steps; None if the run diverged (see ``Result``)


def fine_tune(
    model: nn.Module,
    examples: Sequence[Any],
    collate: Collate,
    config: FineTuneConfig,
    run: Run,
    progress: StepCallback,
) -> Training:
    """Train a model in place.

    The run's seed determines dropout and the order of the examples, which are shuffled anew in each epoch. The last
    batch of an epoch may be smaller. The model takes the output of ``collate`` as keyword arguments and returns an
    object with a scalar ``loss``.
    """
    from transformers import get_linear_schedule_with_warmup

    num_steps = count_steps(len(examples), run.batch_size, config.epochs)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]  # biases and layer norms
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=run.learning_rate)
    # a warm-up begins with a rate of 0, at which a run of a single step would train nothing
    warmup = math.ceil(config.warmup_fraction * num_steps) if num_steps > 1 else 0
    schedule = get_linear_schedule_with_warmup(optimizer, warmup, num_steps)
    torch.manual_seed(run.seed)
    model.train()
    total, last_tenth = torch.zeros(2, device=next(model.parameters()).device)
    batches = shuffled_batches(len(examples), run.batch_size, run.seed)
    start_of_last_tenth = num_steps - max(1, num_steps // 10)
    for step in range(num_steps):
        loss = _forward(model, [examples[i] for i in next(batches)], collate, config).loss
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
            return Training(step + 1, None)
        progress(run, step + 1, num_steps)
    if not all(is_finite(parameter) for parameter in model.parameters()):  # no loss follows the last update
        return Training(num_steps, None)
    return Training(num_steps, last_tenth.item() / (num_steps - start_of_last_tenth))


def count_steps(num_examples: int, batch_size: int, epochs: float) -> int:
    return math.ceil(epochs * math.ceil(num_examples / batch_size))


def shuffled_batches(num_examples: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Indices of the examples of each batch, endless; shuffled anew in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_examples, generator=generator).tolist()
        for start in range(0, num_examples, batch_size):
            yield order[start : start + batch_size]


@torch.inference_mode()
def evaluate(
    model: nn.Module, examples: Sequence[Any], collate: Collate, config: FineTuneConfig
) -> Iterator[tuple[list[int], Any]]:
    """Evaluate a model without dropout; yields the indices of the examples and the model's outputs for each batch.

    Batches are of examples of similar length.
    """
    model.eval()
    order = sorted(range(len(examples)), key=lambda place: len(examples[place]))
    for start in range(0, len(order), config.eval_batch_size):
        places = order[start : start + config.eval_batch_size]
        yield places, _forward(model, [examples[i] for i in places], collate, config)


def _forward(model: nn.Module, batch: Sequence[Any], collate: Collate, config: FineTuneConfig) -> Any:
    """A model's outputs for a batch, computed in the chosen precision."""
    device = next(model.parameters()).device
    inputs = {name: tensor.to(device) for name, tensor in collate(batch).items()}
    with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
        return model(**inputs)


class FineTuneBench(ABC):
    """Executes the runs of a sweep. The model is read at construction.

    Raises UserError if a package that fine-tuning needs is not installed, or the model cannot be used.
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
        """Columns of the table of results."""

    @abstractmethod
    def fingerprint(self, task: str) -> str:
        """Hash of the examples."""

    @abstractmethod
    def inputs(self, task: str) -> Sequence[Sequence[Any]]:
        """The encoded training set, and the development sets."""

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

    def estimate(self, runs: Sequence[Run]) -> float | None:
        """Estimated seconds for ``runs`` one after the other, extrapolated from some steps of the first.

        None if the first has too few examples for that.
        """
        first = runs[0]
        training_set = self.inputs(first.task)[0]
        examples = training_set[: _ESTIMATED_STEPS * first.batch_size]
        ends: list[float] = []
        fine_tune(
            self.new_model(first), examples, partial(self.collate, first.task), replace(self.config, epochs=1.0), first,
            progress=lambda *_: ends.append(time.monotonic()),
        )  # fmt: skip
        if len(ends) < 2:
            return None
        of_an_example = (ends[-1] - ends[0]) / max(1, len(examples) - first.batch_size)
        amounts = {task: self.amounts(task) for task in {run.task for run in runs}}
        of_a_unit = of_an_example * len(training_set) / max(1.0, amounts[first.task][0])
        all_amounts = [amounts[run.task] for run in runs]
        return of_a_unit * sum(self.config.epochs * train + _EVALUATION_COST * dev for train, dev in all_amounts)

    def measure(self, run: Run, progress: StepCallback) -> Result:
        """Train a model and evaluate it on the development sets; the metrics of a diverged run are 0."""
        start = time.monotonic()
        model, training = self.train(run, progress)
        diverged = training.loss is None
        return Result(
            run=run,
            data=self.fingerprint(run.task),
            metrics={c.metric: 0.0 for c in self.columns(run.task)} if diverged else self.score(run, model),
            num_steps=training.num_steps,
            loss=training.loss,
            diverged=diverged,
            seconds=round(time.monotonic() - start, 3),
        )

    def train(self, run: Run, progress: StepCallback = lambda *_: None) -> tuple[Any, Training]:
        """Train the model of a run; returns it (a transformers model) and the outcome."""
        model, collate = self.new_model(run), partial(self.collate, run.task)
        return model, fine_tune(model, self.inputs(run.task)[0], collate, self.config, run, progress)

    def write(self, model: Any, task: str) -> None:
        """Write what is wanted of the best model of a task: with ``save_models`` the model, a folder of transformers.

        Raises OSError if it cannot be written.
        """
        if self.config.save_models:
            folder = self.config.output / "models" / task
            model.save_pretrained(folder)
            self.source(task).encoder.tokenizer.save_pretrained(folder)
            print(f"wrote {folder}")

    def _load(self, load: str) -> Pretrained:
        config = self.config
        pretrained = load_pretrained(load, TokenizerFiles.given(config), self.head)
        if config.max_length > pretrained.max_length:
            raise UserError(
                f"max_length is {config.max_length}; {pretrained.source} has {pretrained.max_length} positions"
            )
        return pretrained
