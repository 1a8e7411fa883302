"""``megatron01 convert``: a model from one format into another."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron01.convert.config import ConvertConfig
from megatron01.convert.formats import checkpoints_of_run, new_folder, read_model
from megatron01.convert.huggingface import write_hf_folder
from megatron01.convert.native import is_checkpoint, write_checkpoint
from megatron01.convert.portable import non_finite
from megatron01.utils.formatting import format_count


def convert(config: ConvertConfig) -> None:
    """Read a model and write it in another format; prints what was converted.

    Raises:
        UserError: if it cannot be read or written.
    """
    final = Path(config.output)
    is_own = is_checkpoint(Path(config.load)) or checkpoints_of_run(Path(config.load)) is not None
    to_hf = config.to == "huggingface" or (config.to == "auto" and is_own)
    with new_folder(final, overwrite=config.overwrite) as folder:
        model = read_model(config.load, config.tokenizer_files())
        notes = list(model.notes)
        if to_hf:
            notes += write_hf_folder(model, folder, dtype=config.dtype, max_shard_gigabytes=config.max_shard_gigabytes)
        else:
            write_checkpoint(model, folder, final=final)
            damaged = non_finite(model.weights)
            if damaged:
                notes.append(f"{len(damaged)} tensors, such as {min(damaged)}, hold NaN or infinite elements")
        if model.tokenizer is None:
            notes.append(
                f"{model.source} holds no tokenizer, so there is none in {final}; to have one there, give"
                " --tokenizer-type and its files (--vocab-file, --merge-file, --tokenizer-model)"
            )
    for note in notes:
        print(f"WARNING: {note}", file=sys.stderr)
    shape = f"{model.config.num_layers} layers, hidden size {model.config.hidden_size}, {model.vocab_size} ids"
    count = format_count(model.num_parameters)
    print(f"{model.source}: {model.architecture} of {count} parameters, {shape}")
    print(f"wrote {final} ({'Hugging Face, ' + config.dtype if to_hf else 'megatron01, weights alone'})")
