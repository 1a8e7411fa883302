"""Which format a folder is in, and reading any of them."""

from __future__ import annotations

from pathlib import Path

from megatron01.errors import UserError
from megatron01.interchange.hf_folder import is_hf_folder, read_hf_folder
from megatron01.interchange.megatron_files import is_megatron, read_megatron
from megatron01.interchange.native import is_checkpoint, read_checkpoint
from megatron01.interchange.portable import PortableModel, TokenizerFiles


def read_model(load: str, tokenizer: TokenizerFiles | None = None) -> PortableModel:
    """The model that a folder or file holds, whoever wrote it.

    Args:
        load: a checkpoint of megatron01 or a folder of them, a folder of Hugging Face transformers, or a checkpoint of
            Megatron-LM.
        tokenizer: in place of the one that belongs to it.

    Raises:
        UserError: if there is no model, or one that cannot be used.
    """
    path = Path(load)
    if not path.exists():
        raise UserError(f"load is {load!r}, which does not exist; expected a model's folder")
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
