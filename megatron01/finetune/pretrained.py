"""Pretrained model for fine-tuning: its body, once in memory, new heads drawn from a seed, and its tokenizer."""

from __future__ import annotations

import copy
import hashlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron01.convert.formats import read_model
from megatron01.convert.hf_tokenizer import find_tokenizer, write_tokenizer
from megatron01.convert.huggingface import (
    is_hf_folder,
    read_weights,
    require_same_rules,
    write_hf_folder,
)
from megatron01.convert.native import is_checkpoint
from megatron01.convert.portable import refuse_non_finite
from megatron01.data.tokenizers import TokenizerFiles, count_ids
from megatron01.errors import UserError
from megatron01.utils.files import writing
from megatron01.utils.formatting import one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Head = Literal["SequenceClassification", "QuestionAnswering"]

_NO_LIMIT = 1_000_000  # model_max_length for a tokenizer without a limit
_MOST_UNUSED_ROWS = 1024  # padding of word embeddings beyond the tokenizer's ids
_DROPOUTS = (  # names in configurations of transformers' encoders
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "embedding_dropout",
    "mlp_dropout",
)
_POSITIONS_BEHIND_PADDING = ("camembert", "roberta", "xlm-roberta")
_HEAD_DROPOUTS = ("classifier_dropout", "seq_classif_dropout", "qa_dropout")
_TEXTS_AT_ONCE = 4096
_LAYER = re.compile(r"\.\d+\.")  # its number in the name of a tensor


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and types of one example."""

    ids: NDArray[np.int32]  # token ids, special tokens included: int32[tokens]
    types: NDArray[np.int8]  # 0 for the first sentence and 1 for the second if the model has types: int8[tokens]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer that adds the special tokens that its model expects around single texts and pairs."""

    tokenizer: Any  # a fast tokenizer of transformers
    uses_types: bool  # the model takes token types

    @property
    def backend(self) -> Backend:
        """The underlying tokenizer of the ``tokenizers`` library, with its template of special tokens."""
        backend: Backend = self.tokenizer.backend_tokenizer
        return backend

    def hash(self) -> str:
        """Hash of all that decides how a text is encoded, but for the length."""
        self.backend.no_padding()
        self.backend.no_truncation()
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()[:16]

    def encode(self, first: Sequence[str], second: Sequence[str] | None, max_length: int) -> list[Encoded]:
        """Encode single texts or pairs, truncated to ``max_length`` tokens at the end of the longer text."""
        self.backend.no_padding()
        self.backend.enable_truncation(max_length, strategy="longest_first")
        texts: Sequence[Any] = first if second is None else list(zip(first, second, strict=True))
        encoded: list[Encoded] = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            encoded += map(as_input, self.backend.encode_batch_fast(list(texts[start : start + _TEXTS_AT_ONCE])))
        return encoded

    def collate(self, examples: Sequence[Encoded]) -> dict[str, Tensor]:
        """Padded keyword arguments of a transformers model: int64[examples, longest] each."""

        def padded(rows: list[NDArray[Any]], padding: int) -> Tensor:
            return pad_sequence([torch.from_numpy(row).long() for row in rows], batch_first=True, padding_value=padding)

        batch = {
            "input_ids": padded([example.ids for example in examples], self.tokenizer.pad_token_id),
            "attention_mask": padded([np.ones_like(example.ids) for example in examples], 0),
        }
        if self.uses_types:
            types = [example.types for example in examples]
            batch["token_type_ids"] = padded(types, self.tokenizer.pad_token_type_id)
        return batch


def as_input(encoding: Any) -> Encoded:
    """Ids and types of an encoding of the ``tokenizers`` library."""
    return Encoded(np.asarray(encoding.ids, dtype=np.int32), np.asarray(encoding.type_ids, dtype=np.int8))


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model."""

    source: str  # its folder, for messages
    head: Head  # kind of head for fine-tuning
    config: Any
    body: dict[str, Tensor]  # its weights without any head, by their names in a model with one: fp32, on the CPU
    encoder: TextEncoder
    max_length: int  # number of positions
    fingerprint: str  # of the body and the tokenizer

    def new_model(self, *, num_outputs: int, seed: int, dropout: float | None) -> Any:
        """A model with this body, and with a head drawn from the seed.

        ``num_outputs``: classes, or 1 for a score; not for question answering. ``dropout`` replaces the model's own
        rates; UserError if its settings name none.
        """
        config = copy.deepcopy(self.config)
        if self.head == "SequenceClassification":
            config.num_labels = num_outputs
            config.problem_type = "regression" if num_outputs == 1 else "single_label_classification"
        if dropout is not None:
            _set_dropout(config, dropout, self.source)
        torch.manual_seed(seed)
        model = _auto_class(self.head).from_config(config, dtype=torch.float32)
        model.load_state_dict(self.body, strict=False)
        return model


def load_pretrained(load: str, tokenizer: TokenizerFiles | None, head: Head) -> Pretrained:
    """Load a pretrained model: a BERT checkpoint of megatron01 or Megatron-LM, or any encoder of transformers.

    A ``tokenizer`` takes the place of the model's own. Raises UserError if the model cannot be read or used, or the
    tokenizer is not the model's.
    """
    path = Path(load)
    if is_hf_folder(path) and not is_checkpoint(path):
        if tokenizer is None:
            return _load_folder(path, path, load, head)
        with tempfile.TemporaryDirectory() as folder:
            with writing(tempfile.gettempdir(), "set TMPDIR"):
                write_tokenizer(tokenizer, Path(folder), max_length=_NO_LIMIT)
            pretrained = _load_folder(path, Path(folder), load, head)
        config = pretrained.config
        own = find_tokenizer(path, model_type=config.model_type, num_ids=config.vocab_size)
        if own is not None:
            require_same_rules(tokenizer.built, own.built)
        return pretrained
    portable = read_model(load, tokenizer)
    if portable.architecture != "BERT":
        raise UserError(
            f"{portable.source} is a {portable.architecture}; expected a BERT, which can be fine-tuned here"
        )
    portable.built_tokenizer()  # raises UserError if it has none
    with tempfile.TemporaryDirectory() as folder:
        with writing(tempfile.gettempdir(), "set TMPDIR"):
            write_hf_folder(portable, Path(folder), dtype="fp32")
        return _load_folder(Path(folder), Path(folder), portable.source, head)


def _load_folder(folder: Path, tokenizer_folder: Path, source: str, head: Head) -> Pretrained:
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # suppresses warnings about newly initialized heads
    logging.disable_progress_bar()
    with _naming(source, "model"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        try:
            model, loaded = _auto_class(head).from_pretrained(
                folder, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
        except Exception:
            read_weights(folder)  # names the file if it is damaged
            raise
    with _naming(source, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    prefix = f"{model.base_model_prefix}."
    body = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(prefix)}
    replaced = {name[0] if isinstance(name, tuple) else name for name in loaded["mismatched_keys"]}
    missing = (set(loaded["missing_keys"]) | replaced) & set(body)
    for name in sorted(missing):
        if ".pooler." not in name:
            raise UserError(
                f"{source} lacks the weights {name}, or their shape is not that of its settings; copy it again"
            )
        del body[name]
    places = {_LAYER.sub(".#.", name) for name in body}  # a file of a model without a head has no prefix
    if more := [n for n in loaded["unexpected_keys"] if {_LAYER.sub(".#.", f"{p}{n}") for p in ("", prefix)} & places]:
        raise UserError(
            f"{source} has more layers than its settings say ({min(more)}); expected config.json and weights of one"
            " model"
        )
    refuse_non_finite(body, source)
    encoder = _encoder(tokenizer, config, source)
    positions = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    if config.model_type in _POSITIONS_BEHIND_PADDING:
        positions -= config.pad_token_id + 1
    return Pretrained(
        source=source,
        head=head,
        config=config,
        body=body,
        encoder=encoder,
        max_length=min(positions, tokenizer.model_max_length),
        fingerprint=f"{_hash_of(body)} with tokenizer {encoder.hash()}",
    )


def _encoder(tokenizer: Any, config: Any, source: str) -> TextEncoder:
    """Text encoder of a tokenizer. Raises UserError if it does not match the model."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{source} has a tokenizer without a tokenizer.json; save it as a fast tokenizer")
    if tokenizer.pad_token_id is None:
        raise UserError(f"{source} has a tokenizer without a padding token; expected that of a BERT")
    backend = tokenizer.backend_tokenizer
    if backend.num_special_tokens_to_add(is_pair=True) < 2:
        raise UserError(
            f"{source} has a tokenizer that adds no special tokens to texts; expected one with [CLS] and [SEP], by"
            " a post_processor in its tokenizer.json"
        )
    vocab_size = count_ids(backend.get_vocab(with_added_tokens=True))
    if not 0 <= config.vocab_size - vocab_size < _MOST_UNUSED_ROWS:
        raise UserError(
            f"the tokenizer of {source} has {vocab_size} ids and the model {config.vocab_size}; give the tokenizer with"
            " which the model was trained"
        )
    if getattr(config, "pad_token_id", None) not in (None, tokenizer.pad_token_id):
        raise UserError(
            f"the tokenizer of {source} pads with id {tokenizer.pad_token_id} and the model with {config.pad_token_id};"
            " give the tokenizer with which the model was trained"
        )
    return TextEncoder(tokenizer, uses_types=getattr(config, "type_vocab_size", 0) > 1)


def _auto_class(head: Head) -> Any:
    import transformers

    return getattr(transformers, f"AutoModelFor{head}")


def _set_dropout(config: Any, dropout: float, source: str) -> None:
    known = [name for name in _DROPOUTS + _HEAD_DROPOUTS if isinstance(getattr(config, name, None), (int, float))]
    if not set(known) & set(_DROPOUTS):
        raise UserError(f"dropout is {dropout}, but the settings of {source} name no dropout; leave it out")
    for name in known:
        setattr(config, name, dropout)


def _hash_of(body: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(body):
        digest.update(name.encode())
        digest.update(body[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


@contextmanager
def _naming(source: str, what: str) -> Iterator[None]:
    """Context manager that turns any error of the libraries into a UserError that names the folder."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = one_line(error, 300)
        raise UserError(f"{source} has no {what} that can be used ({reason}); give the folder of an encoder") from error
