"""Models of any known format: reading, loading for evaluation, and conversion (``megatron01 convert``)."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron01.config import Precision
from megatron01.config.commands import ConvertConfig
from megatron01.config.yaml_files import flat_settings, load_plain_yaml
from megatron01.convert.huggingface import is_hf_folder, read_hf_folder, write_hf_folder
from megatron01.convert.megatron import is_megatron, read_megatron
from megatron01.convert.native import is_checkpoint, read_checkpoint, write_checkpoint
from megatron01.convert.portable import GIVE_ONE, PortableModel, non_finite, refuse_non_finite
from megatron01.data.tokenizers import Tokenizer, TokenizerFiles
from megatron01.errors import UserError
from megatron01.models.bert import Bert
from megatron01.models.gpt2 import GPT2
from megatron01.utils.files import exists, files_below, flush_to_disk, read_json_object, sync_folder, writing
from megatron01.utils.formatting import format_count
from megatron01.utils.precision import DTYPES, require_support, takes_gpu


def checkpoints_of_run(path: Path) -> Path | None:
    """The checkpoint folder of the run whose ``--run-dir`` is ``path``; None if ``path`` is not a run's folder.

    Raises UserError if the run saved no checkpoints, or they are not where its settings say.
    """
    if not (path / "config.yaml").is_file() or not (path / "environment.json").is_file():
        return None
    environment = read_json_object(path / "environment.json", expected="one that a run has written")
    settings = flat_settings(load_plain_yaml(path / "config.yaml"))
    save = settings.get("checkpoint.save", "null")
    if save == "null":
        raise UserError(f"{path} is the folder of a run that saved no checkpoints; give the folder of a model")
    then = Path(str(environment.get("working_folder", "")))
    # seen from the run's folder as they were then: both may have been moved or copied together
    way = os.path.relpath(then / save, then / settings.get("logging.run_dir", ""))
    for place in (Path(os.path.normpath(path / way)), then / save, path / Path(save).name):
        if is_checkpoint(place):
            return place
    raise UserError(f"{path} is the folder of a run whose checkpoints {save} do not exist; give their folder")


def _own_checkpoints(path: Path) -> Path | None:
    """The megatron01 checkpoint or checkpoint folder at a path or of the run there; None for other formats."""
    return checkpoints_of_run(path) or (path if is_checkpoint(path) else None)


def read_model(load: str, tokenizer: TokenizerFiles | None = None) -> PortableModel:
    """Read a model of any known format. Raises UserError if there is no model, or it cannot be read or used.

    ``load``: a checkpoint of megatron01, a folder of them or of a run, a folder of Hugging Face transformers, or a
    checkpoint of Megatron-LM. A ``tokenizer`` takes the place of the model's own.
    """
    path = Path(load)
    try:
        if not exists(path):
            raise UserError(f"load is {load!r}, which does not exist; expected a model's folder")
        if (own := _own_checkpoints(path)) is not None:
            return read_checkpoint(str(own), tokenizer)
        if is_hf_folder(path):
            return read_hf_folder(path, tokenizer)
        if is_megatron(path):
            return read_megatron(path, tokenizer)
    except OSError as error:
        raise UserError(f"{error.filename or load} cannot be read: {error.strerror}") from error
    raise UserError(
        f"{load} holds no model in a known format; expected a folder of checkpoints (with iter_... folders), one of"
        " Hugging Face (with config.json), or one of Megatron-LM (with mp_rank_... folders or .distcp files)"
    )


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Atomic write of a folder: a temporary folder to fill, renamed to ``final`` at the end, removed after an error.

    Raises UserError if ``final`` exists, but as an empty folder, or cannot be written.
    """
    final = Path(os.path.realpath(final))  # the target of a symbolic link
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise UserError(f"{final} exists; give another --output, or remove it first")
    unfinished = final.with_name(f"{final.name}.{os.getpid()}.incomplete")
    with writing(final):
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            for path in files_below(unfinished):
                with open(path, "rb") as file:
                    flush_to_disk(file)
            os.rename(unfinished, final)
            sync_folder(final.parent)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in evaluation mode (no dropout) on its device, and its tokenizer."""

    model: GPT2 | Bert
    tokenizer: Tokenizer
    device: torch.device
    source: str  # the folder, for messages
    notes: tuple[str, ...]  # warnings for the user; each a sentence

    def gpt2(self) -> GPT2:
        """The model, if it is a GPT-2; UserError if it is not."""
        if not isinstance(self.model, GPT2):
            raise UserError(f"{self.source} is a BERT; expected a GPT-2 (for a BERT there is megatron01 fill-mask)")
        return self.model

    def bert(self) -> Bert:
        """The model, if it is a BERT; UserError if it is not."""
        if not isinstance(self.model, Bert):
            raise UserError(f"{self.source} is a GPT-2; expected a BERT (for a GPT-2 there is megatron01 generate)")
        return self.model


def load_model(
    load: str,
    tokenizer: TokenizerFiles | None = None,
    *,
    dtype: Precision = "fp32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> LoadedModel:
    """Load a model of any known format for evaluation; of a megatron01 checkpoint, the synchronized weights.

    Args:
        load: as for ``read_model``.
        tokenizer: used in place of the model's own.
        dtype: of the weights.
        device: auto takes the GPU if there is one.

    Raises:
        UserError: if it cannot be read or used, or the device is missing or does not support bf16.
    """
    chosen = torch.device("cuda" if takes_gpu(device) else "cpu")
    require_support(dtype, chosen, setting="dtype")
    portable = read_model(load, tokenizer)
    refuse_non_finite(portable.weights, portable.source)
    built = portable.built_tokenizer()
    model = portable.build().to(chosen, DTYPES[dtype]).eval()
    return LoadedModel(model=model, tokenizer=built, device=chosen, source=portable.source, notes=portable.notes)


def convert(config: ConvertConfig) -> None:
    """Read a model and write it in another format; prints what was converted.

    Raises UserError if it cannot be read or written.
    """
    final = Path(config.output)
    with new_folder(final) as folder:
        model = read_model(config.load, TokenizerFiles.given(config))
        notes = list(model.notes)
        is_own = _own_checkpoints(Path(config.load)) is not None
        to_hf = config.to == "huggingface" or (config.to == "auto" and is_own)
        if to_hf:
            notes += write_hf_folder(model, folder, dtype=config.dtype)
        elif config.dtype != "fp32":
            raise UserError(
                f"dtype is {config.dtype}, and checkpoints here hold fp32; leave it out, or add --to huggingface"
            )
        else:
            write_checkpoint(model, folder, final=final)
            damaged = non_finite(model.weights)
            if damaged:
                notes.append(f"{len(damaged)} tensors, such as {min(damaged)}, hold NaN or infinite elements")
        if model.tokenizer is None:
            notes.append(f"{model.source} holds no tokenizer, so there is none in {final}; to have one, {GIVE_ONE}")
    for note in notes:
        print(f"WARNING: {note}", file=sys.stderr)
    shape = f"{model.config.num_layers} layers, hidden size {model.config.hidden_size}, {model.vocab_size} ids"
    count = format_count(model.num_parameters)
    print(f"{model.source}: {model.architecture} of {count} parameters, {shape}")
    print(f"wrote {final} ({'Hugging Face, ' + config.dtype if to_hf else 'megatron01, weights alone'})")
