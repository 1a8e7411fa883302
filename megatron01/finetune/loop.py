"""What all tasks share: the training loop, evaluation in batches, and texts as padded batches of token ids.

Source of the recipe: Devlin et al., "BERT" (NAACL 2019), appendix A.3, and its code: Adam with decoupled weight decay,
linear warm-up from 0 and linear decay to 0, gradients clipped to a norm of 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

ExampleT = TypeVar("ExampleT", bound=Sized)
Collate = Callable[[Sequence[ExampleT]], dict[str, Tensor]]

_STEPS_BETWEEN_CHECKS = 50  # of whether the loss is a number, for which a GPU has to be waited for


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
        num_steps: that were made.
        loss: mean over the last tenth of them.
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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Training:
    """Train a model in place.

    The seed decides the order of the examples, which is another one in each epoch, and dropout. The last batch of an
    epoch may be smaller.

    Args:
        model: takes what ``collate`` makes as arguments and returns an object with a ``loss``.
        examples: the training set.
        collate: makes a batch.
        recipe: how.
        seed: any number.
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


_TEXTS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Encoded:
    """The input of one example.

    Attributes:
        ids: of its tokens, special ones included: int32[tokens].
        types: 0 for the first sentence and 1 for the second, as the model has it: int8[tokens].
    """

    ids: NDArray[np.int32]
    types: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer of Hugging Face, with the special tokens around single texts and pairs that its model expects.

    Attributes:
        backend: the pipeline, with its template of special tokens.
        pad, pad_type: what fills batches.
        uses_types: True if the model takes token types.
        vocab_size: number of ids.
    """

    backend: Backend
    pad: int
    pad_type: int
    uses_types: bool
    vocab_size: int

    def encode(self, first: Sequence[str], second: Sequence[str] | None, max_length: int) -> list[Encoded]:
        """Single texts or pairs of them, each truncated to ``max_length`` tokens at the end of its longer text."""
        self.backend.no_padding()
        self.backend.enable_truncation(max_length, strategy="longest_first")
        encoded = []
        for start in range(0, len(first), _TEXTS_AT_ONCE):
            chunk = slice(start, start + _TEXTS_AT_ONCE)
            texts: Any = first[chunk] if second is None else list(zip(first[chunk], second[chunk], strict=True))
            encoded += [as_input(encoding) for encoding in self.backend.encode_batch_fast(list(texts))]
        return encoded

    def collate(self, examples: Sequence[Encoded]) -> dict[str, Tensor]:
        """The arguments of a model of transformers: int64[examples, longest] each."""
        longest = max(map(len, examples))
        ids = np.full((len(examples), longest), self.pad, dtype=np.int64)
        types = np.full((len(examples), longest), self.pad_type, dtype=np.int64)
        mask = np.zeros((len(examples), longest), dtype=np.int64)
        for row, example in enumerate(examples):
            ids[row, : len(example)] = example.ids
            types[row, : len(example)] = example.types
            mask[row, : len(example)] = 1
        arrays = {"input_ids": ids, "attention_mask": mask} | ({"token_type_ids": types} if self.uses_types else {})
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def as_input(encoding: Any) -> Encoded:
    """What a model gets of an encoding of the ``tokenizers`` library."""
    return Encoded(np.asarray(encoding.ids, dtype=np.int32), np.asarray(encoding.type_ids, dtype=np.int8))
