"""Training and evaluation of a fine-tuning run, and what its commands share: tables, and what is made of best runs.

Source of the recipe: Devlin et al., "BERT" (NAACL 2019), appendix A.3, and its code: Adam with decoupled weight decay,
linear warm-up from 0 and linear decay to 0, gradients clipped to a norm of 1.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from megatron01.errors import UserError
from megatron01.finetune.config import FineTuneConfig, GlueConfig, SquadConfig
from megatron01.finetune.pretrained import Encoded, Head, Pretrained, TextEncoder, load_pretrained
from megatron01.finetune.report import (
    Setting,
    TableRow,
    best_lines,
    best_settings,
    comparison,
    own_row,
    result_files,
    settings_of,
)
from megatron01.finetune.sweep import Column, Result, Run, Sweep, once, warn, write_tables
from megatron01.utils.formatting import columns as lines_of

ExampleT = TypeVar("ExampleT", bound=Sized)
Collate = Callable[[Sequence[ExampleT]], dict[str, Tensor]]

_STEPS_BETWEEN_CHECKS = 50  # of whether the loss is a number, for which a GPU has to be waited for


def _ignore(done: int, total: int) -> None:
    """Progress that nobody follows."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a run trains; the fields are those of ``FineTuneConfig``."""

    batch_size: int
    learning_rate: float
    epochs: float
    warmup_fraction: float
    weight_decay: float
    clip_grad: float
    bf16: bool


@dataclass(frozen=True)
class Training:
    """What has become of a training.

    Attributes:
        loss: mean over the last tenth of the steps.
        diverged: True if the loss was NaN or infinite at some step; training then ends early.
    """

    num_steps: int
    loss: float
    diverged: bool


def fine_tune(
    model: nn.Module,
    examples: Sequence[ExampleT],
    collate: Collate[ExampleT],
    recipe: Recipe,
    *,
    seed: int,
    progress: Callable[[int, int], None] = _ignore,
) -> Training:
    """Train a model in place.

    The seed decides the order of the examples, which is another one in each epoch, and dropout. The last batch of an
    epoch may be smaller.

    Args:
        model: takes what ``collate`` makes as arguments and returns an object with a ``loss``.
        progress: called after each step with the steps done and in all.
    """
    device = next(model.parameters()).device
    num_steps = count_steps(len(examples), recipe)
    optimizer = torch.optim.AdamW(_groups(model, recipe.weight_decay), lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, num_steps, recipe))
    torch.manual_seed(seed)
    model.train()
    last_tenth = torch.zeros((), device=device)
    total = torch.zeros((), device=device)
    batches = shuffled_batches(len(examples), recipe.batch_size, seed)
    start_of_last_tenth = num_steps - max(1, num_steps // 10)
    for step in range(num_steps):
        inputs = {name: tensor.to(device) for name, tensor in collate([examples[i] for i in next(batches)]).items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.bf16):
            loss = model(**inputs).loss
        loss.backward()
        if recipe.clip_grad:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad)
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


def count_steps(num_examples: int, recipe: Recipe) -> int:
    """Steps of a whole training."""
    return math.ceil(recipe.epochs * math.ceil(num_examples / recipe.batch_size))


def lr_share(step: int, num_steps: int, recipe: Recipe) -> float:
    """The learning rate of step 0, 1, ... as a share of its peak: up from 0, then down to 0 behind the last step."""
    warmup = math.ceil(recipe.warmup_fraction * num_steps)
    if step < warmup:
        return step / warmup
    return max(0.0, (num_steps - step) / max(1, num_steps - warmup))


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    examples: Sequence[ExampleT],
    collate: Collate[ExampleT],
    *,
    batch_size: int,
    bf16: bool,
) -> Iterator[tuple[list[int], Any]]:
    """The outputs of a model without dropout: for each batch the places of its examples, and what the model returns.

    Examples of similar length are computed together.
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


def shuffled_batches(num_examples: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """The places of the examples of one batch after the other, without end; each epoch has another order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_examples, generator=generator).tolist()
        for start in range(0, num_examples, batch_size):
            yield order[start : start + batch_size]


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Biases and layer norms, which are the vectors, do not decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


# What the commands share.

Columns = Mapping[str, Sequence[Column]]
"""The columns of the table of results, by task."""


_ESTIMATED_STEPS = 8  # of which the first does not count
_EVALUATION = 0.25  # time of an example that is evaluated, of one that is trained on


class FineTuneBench(ABC):
    """Does the runs of a sweep. The model is read at once. Raises UserError if the model cannot be used."""

    head: ClassVar[Head]

    def __init__(self, config: GlueConfig | SquadConfig, device: torch.device) -> None:
        self._max_length = config.max_length
        self._settings: FineTuneConfig = config
        self._device = device
        self.pretrained = self._load(config.load)

    @abstractmethod
    def columns(self, task: str) -> Sequence[Column]:
        """Of the table of results; their metrics are 0 for a run that diverges."""

    @abstractmethod
    def fingerprint(self, task: str) -> str:
        """Hash of the examples."""

    @abstractmethod
    def model_of(self, run: Run) -> Any:
        """The model of transformers that a run starts from."""

    @abstractmethod
    def training_set(self, task: str) -> Sequence[Any]:
        """The examples that a run trains on."""

    @abstractmethod
    def collate(self, task: str, examples: Sequence[Any]) -> dict[str, Tensor]:
        """The arguments of a model for a batch, with its labels."""

    @abstractmethod
    def score(self, run: Run, model: Any) -> dict[str, float]:
        """The metrics of the development sets, 1 is best."""

    @abstractmethod
    def amounts(self, task: str) -> tuple[float, float]:
        """How much a run of a task trains on in an epoch, and evaluates at the end, compared with other tasks."""

    def estimate(self, runs: Sequence[Run]) -> float:
        """Seconds that ``runs`` take one after the other, roughly: from some steps of the first."""
        first = runs[0]
        examples = self.training_set(first.task)[: _ESTIMATED_STEPS * first.batch_size]
        ends: list[float] = []
        collate = partial(self.collate, first.task)
        recipe = replace(self._recipe(first), epochs=1.0)
        fine_tune(
            self.model_of(first), examples, collate, recipe, seed=0, progress=lambda *_: ends.append(time.monotonic())
        )
        if len(ends) < 2:
            return 0.0
        of_an_example = (ends[-1] - ends[0]) / max(1, len(examples) - first.batch_size)
        of_its_epoch = of_an_example * len(self.training_set(first.task))
        amounts = {task: self.amounts(task) for task in {run.task for run in runs}}
        of_a_unit = of_its_epoch / max(1.0, amounts[first.task][0])
        shares = [amounts[run.task] for run in runs]
        return of_a_unit * sum(self._settings.epochs * trained + _EVALUATION * measured for trained, measured in shares)

    def measure(self, run: Run, progress: Callable[[int, int], None] = _ignore) -> Result:
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

    def train(self, run: Run, progress: Callable[[int, int], None] = _ignore) -> tuple[Any, Training]:
        """The model that a run makes, of transformers, and how its training went."""
        model = self.model_of(run)
        recipe = self._recipe(run)
        collate = partial(self.collate, run.task)
        return model, fine_tune(model, self.training_set(run.task), collate, recipe, seed=run.seed, progress=progress)

    def _recipe(self, run: Run) -> Recipe:
        return Recipe(
            batch_size=run.batch_size,
            learning_rate=run.learning_rate,
            epochs=self._settings.epochs,
            warmup_fraction=self._settings.warmup_fraction,
            weight_decay=self._settings.weight_decay,
            clip_grad=self._settings.clip_grad,
            bf16=self._settings.precision == "bf16",
        )

    def _load(self, load: str) -> Pretrained:
        pretrained = load_pretrained(load, self._settings.tokenizer_files(), self.head)
        if self._max_length > pretrained.max_length:
            raise UserError(
                f"max_length is {self._max_length}; {pretrained.source} has {pretrained.max_length} positions"
            )
        return pretrained

    def _outputs(
        self, model: Any, examples: Sequence[Encoded], encoder: TextEncoder
    ) -> Iterator[tuple[list[int], Any]]:
        """The places of the examples of each batch, and what the model returns for them."""
        settings = self._settings
        bf16 = settings.precision == "bf16"
        return evaluate(model, examples, encoder.collate, batch_size=settings.eval_batch_size, bf16=bf16)


def show_tables(
    config: FineTuneConfig, sweep: Sweep, columns_of: Columns, others: Sequence[TableRow] = (), note: str = ""
) -> dict[str, Setting]:
    """Print and write the tables of a sweep; returns the best setting of each task.

    Args:
        others: rows of other models, to compare with.
    """
    settings = settings_of(sweep.results)
    best = best_settings(settings, columns_of)
    if not best:
        return best
    spread = best_lines(best, columns_of)
    one_each = config.seeds * len(config.batch_sizes) * len(config.learning_rates) == 1
    what = "One run of each task" if one_each else "Median over seeds of the best setting"
    print(f"\n{what}, in per cent:\n")
    print("\n".join(spread))
    titles = [column.title for columns in columns_of.values() for column in columns]
    cells = comparison([*others, own_row(config.name or config.load, best, columns_of)], titles)
    remarks = ""
    if others:
        print("\nBeside published results:\n")
        print("\n".join(lines_of(cells)))
    if note:
        print(f"\n{note}")
        indented = "\n".join(f"    {line}" for line in spread)
        remarks = f"\n{note}\n\n{what}:\n\n{indented}\n"
    files = result_files(cells, settings, columns_of, remarks)
    write_tables(config.output, files)
    print(f"\nwrote {', '.join(files)} in {config.output}")
    return best


def finish(
    config: FineTuneConfig,
    bench: FineTuneBench,
    sweep: Sweep,
    best: Mapping[str, Setting],
    *,
    wanted: str,
    make: Callable[[str, Any], None],
) -> None:
    """Train the best run of each task once more and make something of its model, unless that was done already.

    Args:
        sweep: must be complete, else a warning is all that happens.
        wanted: what is made, for the name of the file that marks it as done.
        make: gets the task and the model.
    """
    if sweep.share.count > 1 or not sweep.is_complete:
        warn(
            "models and predictions are made when all runs are finished, outside of array jobs; give the same command"
            " again then"
        )
        return

    def train_and_make(run: Run) -> None:
        print(f"training once more: {run}", flush=True)
        make(run.task, bench.train(run)[0])

    for task, setting in best.items():
        run = setting.best_run(bench.columns(task)[0].metric)
        marker = config.output / "finished" / f"{task}-{wanted}.json"
        once(marker, run, bench.fingerprint(task), partial(train_and_make, run))


def check_packages() -> None:
    """Make sure that what fine-tuning needs is installed. Raises UserError naming the extra to install."""
    try:
        import scipy
        import sklearn
        import transformers
    except ImportError as error:
        raise UserError(
            f"fine-tuning needs {error.name}, which is not installed; pip install 'megatron01[finetune]'"
        ) from error
    assert scipy and sklearn and transformers
