"""Folders of Hugging Face transformers: ``config.json``, weights in safetensors files, tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron01.config import BertModelConfig, Precision
from megatron01.data.tokenization.build import build_tokenizer
from megatron01.data.tokenization.tokenizer import Tokenizer
from megatron01.errors import UserError
from megatron01.files import read_json_object
from megatron01.interchange.hf_config import from_hf_config, to_hf_config
from megatron01.interchange.hf_tokenizer import find_tokenizer, write_tokenizer
from megatron01.interchange.key_maps import from_hf, hf_tensors
from megatron01.interchange.portable import PortableModel, TokenizerFiles, refuse_non_finite
from megatron01.interchange.torch_files import load_tensors
from megatron01.precision import DTYPES

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FILE = "a file of transformers"
_PICKLED_WEIGHTS = "pytorch_model.bin"
_PICKLED_INDEX = "pytorch_model.bin.index.json"
_DTYPE_NAMES: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SAMPLE = "The Quick brown fox isn't jumping over 1234567890 sleepy dogs; \u00c9tienne, in (old) Z\u00fcrich: yes!"


def is_hf_folder(path: Path) -> bool:
    """Whether a path looks like a model of transformers."""
    return (path / CONFIG_FILE).is_file()


def read_hf_folder(path: Path, tokenizer: TokenizerFiles | None = None) -> PortableModel:
    """The model in a folder of transformers; nothing in it is executed.

    Weights are read from ``model.safetensors``, its shards, or ``pytorch_model.bin`` (tensors only).

    Args:
        path: the folder.
        tokenizer: in place of the one in the folder.

    Raises:
        UserError: if a file is missing or damaged, if the model is one that ours cannot be, or holds NaN or infinities.
    """
    entries = read_json_object(path / CONFIG_FILE, expected=_FILE)
    config, num_ids = from_hf_config(entries, str(path / CONFIG_FILE))
    state = _open_weights(path)
    weights = from_hf(state, config, num_ids)
    refuse_non_finite(weights, str(path))
    own = find_tokenizer(path, model_type=str(entries["model_type"]))
    files = tokenizer or own
    model = PortableModel(source=str(path), config=config, vocab_size=num_ids, weights=weights, tokenizer=files)
    model.without_weights()  # whose shapes must be the settings'
    if files is None:
        return model
    built = build_tokenizer(files)
    if tokenizer is not None and own is not None:
        require_same_rules(built, build_tokenizer(own))
    if built.vocab_size == num_ids:
        return model
    if built.vocab_size > num_ids:
        raise UserError(
            f"{built.name} has {built.vocab_size} ids and the model in {path} {num_ids}; give the tokenizer with which"
            " it was trained"
        )
    note = (
        f"{num_ids - built.vocab_size} rows of {path}'s vocabulary of {num_ids} have no token in {built.name}; they are"
        " left out as padding"
    )
    return replace(model.for_vocabulary(built.vocab_size, built.name), notes=(note,))


def require_same_rules(given: Tokenizer, own: Tokenizer) -> None:
    """Make sure that a tokenizer cuts text as the model's own does.

    Raises:
        UserError: if it has another number of ids, or makes others of a sample.
    """
    if given.vocab_size != own.vocab_size or given.encode(_SAMPLE) != own.encode(_SAMPLE):
        raise UserError(
            f"{given.name} ({given.vocab_size} ids) cuts text into other tokens than the model's own {own.name}"
            f" ({own.vocab_size} ids); give the tokenizer with which the model was trained"
        )


def write_hf_folder(model: PortableModel, folder: Path, *, dtype: Precision, max_shard_gigabytes: float) -> list[str]:
    """Write a folder from which ``AutoModel`` and ``AutoTokenizer`` load, without a network.

    Args:
        model: what to write.
        folder: an existing, empty folder.
        dtype: of the weights in the files.
        max_shard_gigabytes: weights are spread over files of at most this size (one tensor may be larger); so much
            memory is needed beside the model.

    Returns:
        Notes for the user.
    """
    notes = []
    tokenizer = None if model.tokenizer is None else model.built_tokenizer()
    if model.tokenizer is not None and tokenizer is not None:
        max_length = model.config.max_position_embeddings
        note = write_tokenizer(model.tokenizer, tokenizer, folder, max_length=max_length)
        notes += [note] if note else []
    else:
        notes.append("the model has no tokenizer, so none is in the folder")
    eod = None if tokenizer is None else tokenizer.eod
    pad = 0 if tokenizer is None or tokenizer.masking is None else tokenizer.masking.pad
    entries = to_hf_config(model.config, model.vocab_size, binary_head=model.has_binary_head, eod=eod, pad=pad) | {
        "dtype": _DTYPE_NAMES[dtype]
    }
    _write_json(folder / CONFIG_FILE, entries)
    if not isinstance(model.config, BertModelConfig):
        _write_json(folder / "generation_config.json", {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": eod})
    tensors = hf_tensors(model.weights, model.config, model.vocab_size)
    cast = ((name, tensor.to(DTYPES[dtype])) for name, tensor in tensors)
    changed = _write_weights(cast, folder, max_bytes=round(max_shard_gigabytes * 1e9))
    if changed:
        notes.append(
            f"{len(changed)} tensors, such as {changed[0]}, hold NaN or infinite elements: they are too large for"
            f" {dtype}, or training has diverged"
        )
    return notes


class _Safetensors(Mapping[str, Tensor]):
    """The tensors of safetensors files, each read when it is asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files  # tensor name -> file

    def __getitem__(self, name: str) -> Tensor:
        path = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read ({error}); copy it again") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _open_weights(folder: Path) -> Mapping[str, Tensor]:
    if (folder / INDEX_FILE).is_file():
        return _Safetensors(_names_in(_shards(folder, INDEX_FILE)))
    if (folder / WEIGHTS_FILE).is_file():
        return _Safetensors(_names_in([folder / WEIGHTS_FILE]))
    if (folder / _PICKLED_INDEX).is_file():
        return {name: tensor for path in _shards(folder, _PICKLED_INDEX) for name, tensor in _load(path).items()}
    if (folder / _PICKLED_WEIGHTS).is_file():
        return _load(folder / _PICKLED_WEIGHTS)
    raise UserError(f"{folder} holds no {WEIGHTS_FILE} and no {_PICKLED_WEIGHTS}; expected the weights of the model")


def _load(path: Path) -> dict[str, Tensor]:
    contents = load_tensors(path)
    if not isinstance(contents, Mapping) or not all(isinstance(tensor, Tensor) for tensor in contents.values()):
        raise UserError(f"{path} does not hold tensors by name; expected the weights of a model of transformers")
    return dict(contents)


def _shards(folder: Path, index_name: str) -> list[Path]:
    """The files that an index names: all of them in the folder itself."""
    index = read_json_object(folder / index_name, expected=_FILE).get("weight_map")
    names = set(index.values()) if isinstance(index, Mapping) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(f"{folder / index_name} names no files of this folder; expected an index of weights")
    return [folder / name for name in sorted(names)]


def _names_in(paths: list[Path]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged or not a safetensors file ({error}); copy it again") from error
    return files


def _write_weights(tensors: Iterator[tuple[str, Tensor]], folder: Path, *, max_bytes: int) -> list[str]:
    """Write tensors into one file or several; returns the names of those with NaN or infinite elements."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total, unusable = 0, []

    def flush() -> None:
        path = folder / f"shard-{len(shards)}"
        save_file(pending, path, metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG_FILE, path)  # safetensors' own is for the owner alone
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(other.nbytes for other in pending.values()) + tensor.nbytes > max_bytes:
            flush()
        if not tensor.isfinite().all():
            unusable.append(name)
        # a view of a larger buffer is copied: safetensors refuses names that share memory
        pending[name] = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / WEIGHTS_FILE)
        return unusable
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return unusable


def _write_json(path: Path, entries: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
