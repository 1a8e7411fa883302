"""Reads a model of any known format, and writes a folder that is there completely or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron01.config.yaml_files import load_plain_yaml
from megatron01.convert.huggingface import is_hf_folder, read_hf_folder
from megatron01.convert.megatron import is_megatron, read_megatron
from megatron01.convert.native import is_checkpoint, read_checkpoint
from megatron01.convert.portable import PortableModel, TokenizerFiles
from megatron01.errors import UserError
from megatron01.utils.files import read_json_object, sync_folder


def checkpoints_of_run(path: Path) -> Path | None:
    """The folder of checkpoints of the run in the folder ``path`` (its ``--run-dir``); None if there is no run.

    Raises:
        UserError: if the run has none, or they are not where its settings say.
    """
    if not (path / "config.yaml").is_file() or not (path / "environment.json").is_file():
        return None
    settings = load_plain_yaml(path / "config.yaml")
    environment = read_json_object(path / "environment.json", expected="one that a run has written")
    try:
        save = str(settings["checkpoint"]["save"])
    except (LookupError, TypeError):
        save = "null"
    if save == "null":
        raise UserError(f"{path} is the folder of a run that saved nothing; give the folder of a model")
    places = (Path(save), Path(str(environment.get("working_folder", ""))) / save, path / Path(save).name)
    for place in places:
        if is_checkpoint(place):
            return place
    raise UserError(f"{path} is the folder of a run whose checkpoints, {save}, are not there; give their folder")


def read_model(load: str, tokenizer: TokenizerFiles | None = None) -> PortableModel:
    """The model that a folder or file holds, whoever wrote it.

    Args:
        load: a checkpoint of megatron01, a folder of them or of a run, a folder of Hugging Face transformers, or a
            checkpoint of Megatron-LM.
        tokenizer: in place of the one that belongs to it.

    Raises:
        UserError: if there is no model, or one that cannot be used.
    """
    path = Path(load)
    if not path.exists():
        raise UserError(f"load is {load!r}, which does not exist; expected a model's folder")
    if (of_run := checkpoints_of_run(path)) is not None:
        return read_checkpoint(str(of_run), tokenizer)
    if is_checkpoint(path):
        return read_checkpoint(load, tokenizer)
    if is_hf_folder(path):
        return read_hf_folder(path, tokenizer)
    if is_megatron(path):
        return read_megatron(path, tokenizer)
    raise UserError(
        f"{load} holds no model that is known here; expected a folder of checkpoints (with iter_... folders), one of"
        " Hugging Face (with config.json), or one of Megatron-LM (with mp_rank_... folders)"
    )


_WRITTEN = re.compile(
    r"(?:generation_|tokenizer_)?config\.json|model.*\.safetensors|model\.safetensors\.index\.json|tokenizer\.(?:json|model)"
    r"|special_tokens_map\.json|vocab\.(?:txt|json)|merges\.txt|tokenizer|iter_0000000|latest_checkpointed_iteration\.txt"
)


@contextmanager
def new_folder(final: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to fill, which gets its name at the end; an error leaves nothing new behind.

    Args:
        final: the name. Something may have it only if it is an empty folder, or with ``overwrite``.
        overwrite: replace a folder that holds what a conversion writes, and nothing else.

    Raises:
        UserError: if there is something that is not to be replaced, or if the folder cannot be written.
    """
    final = Path(os.path.realpath(final))  # the place to which a symbolic link leads
    _check_free(final, overwrite=overwrite)
    unfinished = final.with_name(f"{final.name}.{os.getpid()}.incomplete")
    try:
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            for path in unfinished.rglob("*"):
                if path.is_file():
                    with open(path, "rb") as file:
                        os.fsync(file.fileno())
            _put_in_place(unfinished, final)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{final} cannot be written: {error.strerror or error}") from error


def _check_free(final: Path, *, overwrite: bool) -> None:
    if not final.exists():
        return
    if not final.is_dir():
        raise UserError(f"{final} exists and is not a folder; give another --output")
    entries = sorted(path.name for path in final.iterdir())
    if not entries:
        return
    if not overwrite:
        raise UserError(f"{final} exists; give another --output, or --overwrite to replace it")
    for name in entries:
        if not _WRITTEN.fullmatch(name):
            raise UserError(
                f"{final} holds {name}, which no conversion writes, so it is not replaced; give another --output"
            )


def _put_in_place(unfinished: Path, final: Path) -> None:
    replaced = final.with_name(f"{final.name}.{os.getpid()}.replaced")
    if final.exists():
        os.rename(final, replaced)
    os.rename(unfinished, final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
