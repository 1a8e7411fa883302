"""megatron01 checkpoints: reading the synchronized weights without an optimizer, and writing weights alone."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron01.checkpoint import manifest
from megatron01.checkpoint.reshard import SavedState, ShardLayout, StateSlice, read_headers
from megatron01.checkpoint.save import save_checkpoint
from megatron01.config import (
    BertDataConfig,
    BertModelConfig,
    BertPretrainConfig,
    DataConfig,
    DistributedConfig,
    GPTDataConfig,
    GPTPretrainConfig,
    PretrainConfig,
)
from megatron01.config.yaml_files import config_from_yaml, dump_yaml, load_plain_yaml
from megatron01.convert.hf_tokenizer import copy_tokenizer
from megatron01.convert.huggingface import require_same_rules
from megatron01.convert.portable import GIVE_ONE, PortableModel, vocabulary_rows
from megatron01.data.tokenizers import TokenizerFiles
from megatron01.errors import UserError
from megatron01.models.tensor_parallel import partitions_for
from megatron01.parallel import LaunchEnvironment, initialize
from megatron01.utils.files import shipped

UNKNOWN_TOKENIZER = ""  # the tokenizer fingerprint of a model whose tokenizer is not known

TOKENIZER_FOLDER = "tokenizer"  # folder with tokenizer files, beside the checkpoints that ``write_checkpoint`` writes

_SETTINGS: dict[str, type[PretrainConfig]] = {"GPT2": GPTPretrainConfig, "Bert": BertPretrainConfig}
"""Settings class by the model name in a checkpoint."""

_NEEDED_DATA = ("seq_length", "tokenizer_type", "vocab_file", "merge_file", "tokenizer_model")


def is_checkpoint(path: Path) -> bool:
    """True if a path looks like a megatron01 checkpoint, also a renamed one, or a folder of them."""
    if manifest.iteration_path(str(path)) is not None or (path / manifest.METADATA_NAME).is_file():
        return (path / manifest.CONFIG_NAME).is_file()
    return any(path.glob(f"iter_*/{manifest.CONFIG_NAME}"))


def read_checkpoint(load: str, tokenizer: TokenizerFiles | None = None) -> PortableModel:
    """Read the master weights of a checkpoint, as of its last synchronization, in fp32; one copy in memory.

    Raises UserError if there is no checkpoint, it is damaged, or the tokenizer is not the one of the training.

    Args:
        load: a folder of checkpoints (its newest is taken), or one ``iter_...`` folder.
        tokenizer: used in place of the files that the checkpoint's settings name.
    """
    checkpoint = manifest.existing_folder(*manifest.locate(load))
    metadata = manifest.read_metadata(checkpoint)
    if metadata.model not in _SETTINGS:
        raise UserError(
            f"{checkpoint} is of {metadata.model or 'a model of unknown class'}, and only the models of this package"
            f" ({', '.join(_SETTINGS)}) can be built from a checkpoint; load the weights x.NAME of its .safetensors"
            " files into your own model"
        )
    config = _read_settings(checkpoint, metadata)
    files = tokenizer or _tokenizer_files(config.data, checkpoint)
    built = files.built
    if metadata.tokenizer_fingerprint not in (built.fingerprint, UNKNOWN_TOKENIZER):
        if metadata.optimizer != manifest.WEIGHTS_ALONE or files.tokenizer_type == config.data.tokenizer_type:
            raise UserError(
                f"{built.name} is not the vocabulary with which {checkpoint} was trained (fingerprint"
                f" {built.fingerprint[:12]} and {metadata.tokenizer_fingerprint[:12]}); give that one with --vocab-file"
                " (and --merge-file, --tokenizer-model)"
            )
        # a tokenizer.json that came with the weights may have the rules of a vocab.txt or vocab.json
        require_same_rules(built, _tokenizer_files(config.data, checkpoint).built)
    weights = _read_weights(checkpoint, metadata, config)
    model = PortableModel(
        source=str(checkpoint),
        # the choice of layer-norm kernel in training does not matter here
        config=dataclasses.replace(config.model, fused_layernorm="torch"),  # type: ignore[arg-type]
        vocab_size=vocabulary_rows(weights),
        weights=weights,
        tokenizer=files,
    ).for_tokenizer(built)
    model.without_weights()  # checks shapes against the settings
    return model


def write_checkpoint(model: PortableModel, folder: Path, *, final: Path) -> Path:
    """Write a checkpoint of weights alone (iteration 0, fp32), and the tokenizer's files beside it; returns its folder.

    ``folder`` exists and is empty, and will be renamed to ``final``, with which the settings' paths of tokenizer files
    start. Raises UserError if it cannot be written.
    """
    fingerprint = UNKNOWN_TOKENIZER
    data: dict[str, Any] = {"seq_length": model.config.max_position_embeddings}
    if model.tokenizer is not None:
        fingerprint = model.built_tokenizer().fingerprint
        names = copy_tokenizer(model.tokenizer, folder / TOKENIZER_FOLDER)
        data |= {setting: str(final / TOKENIZER_FOLDER / name) for setting, name in names.items()}
        data["tokenizer_type"] = model.tokenizer.tokenizer_type
    config: PretrainConfig
    if isinstance(model.config, BertModelConfig):
        data["objective"] = "sop" if model.has_binary_head else "none"
        config = BertPretrainConfig(model=model.config, data=BertDataConfig(**data))
    else:
        config = GPTPretrainConfig(model=model.config, data=GPTDataConfig(**data))
    weights = {name: tensor.float() for name, tensor in model.padded_weights().items()}
    metadata = manifest.CheckpointMetadata(
        iteration=0,
        consumed_samples=0,
        world_size=1,
        optimizer=manifest.WEIGHTS_ALONE,
        tokenizer_fingerprint=fingerprint,
        parameters={name: tuple(tensor.shape) for name, tensor in weights.items()},
        device="cpu",
        model="Bert" if isinstance(model.config, BertModelConfig) else "GPT2",
    )
    with initialize(LaunchEnvironment.read({}), DistributedConfig()) as alone:
        return save_checkpoint(
            folder,
            metadata,
            tensors={f"x.{name}": tensor.view(-1) for name, tensor in weights.items()},
            replica_values={},
            config_yaml=dump_yaml(config),
            group=alone,
        )


def _read_settings(checkpoint: Path, metadata: manifest.CheckpointMetadata) -> PretrainConfig:
    """Settings of model and tokenizer; those of training are skipped, as another version may have written them."""
    path = checkpoint / manifest.CONFIG_NAME
    manifest.check_contents(checkpoint, metadata.files, [manifest.CONFIG_NAME])
    sections = load_plain_yaml(path)
    try:
        needed = {"model": sections["model"], "data": {name: sections["data"][name] for name in _NEEDED_DATA}}
    except (LookupError, TypeError) as error:
        raise UserError(f"{path} does not hold the settings of a run ({error}); use another checkpoint") from error
    return config_from_yaml(yaml.safe_dump(needed), _SETTINGS[metadata.model], source=str(path))


def _tokenizer_files(data: DataConfig, checkpoint: Path) -> TokenizerFiles:
    """The tokenizer files that the settings name: in ``TOKENIZER_FOLDER`` beside the checkpoints, or at their paths."""
    files = TokenizerFiles.of(data)
    if not files.by_setting:
        raise UserError(f"{checkpoint} holds no tokenizer; {GIVE_ONE}")
    beside = checkpoint.parent / TOKENIZER_FOLDER
    moved = {setting: str(beside / Path(file).name) for setting, file in files.by_setting.items()}
    if all(Path(file).is_file() for file in moved.values()):
        return dataclasses.replace(files, **moved)  # type: ignore[arg-type]
    for setting, file in files.by_setting.items():
        if not shipped(file).exists():
            flag = "--" + setting.replace("_", "-")
            raise UserError(
                f"{checkpoint} was trained with the tokenizer {file}, which does not exist on this machine; give"
                f" --tokenizer-type {files.tokenizer_type} and {flag} FILE"
            )
    return files


def _read_weights(checkpoint: Path, metadata: manifest.CheckpointMetadata, config: PretrainConfig) -> dict[str, Tensor]:
    """The master weights x, fp32, by parameter name."""
    layout = ShardLayout(metadata.parameters, partitions_for(config.model, metadata.parameters))
    try:
        saved = SavedState(checkpoint, metadata, layout, read_headers(checkpoint, metadata))
        for name, shape in metadata.parameters.items():
            saved.require(StateSlice("x", name, 0, torch.empty(math.prod(shape), device="meta")), 1)
    except UserError:
        manifest.check_contents(checkpoint, metadata.files, metadata.files)  # a damaged file may be the cause
        raise
    manifest.check_contents(checkpoint, metadata.files, saved.files(f"x.{name}" for name in metadata.parameters))
    weights = {name: torch.empty(shape) for name, shape in metadata.parameters.items()}
    for name, weight in weights.items():
        saved.read(StateSlice("x", name, 0, weight.view(-1)), range(metadata.world_size))
    return weights
