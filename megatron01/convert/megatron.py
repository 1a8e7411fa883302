"""Import of Megatron-LM checkpoints (formats ``torch`` and ``torch_dist``): BERT and GPT-2, of any parallelism.

    {folder}/latest_checkpointed_iteration.txt             an iteration, or "release"
    {folder}/iter_0001000/mp_rank_00/model_optim_rng.pt    torch: and mp_rank_01, ... with tensor parallelism
    {folder}/iter_0001000/mp_rank_00_000/...               torch with pipeline parallelism; only one stage is supported
    {folder}/iter_0001000/metadata.json                    torch_dist (the default today), with any parallelism
    {folder}/iter_0001000/.metadata, __0_0.distcp, ...     its tensors, of torch.distributed.checkpoint
    {folder}/iter_0001000/common.pt                        its other state; in newer versions an object in those

Each file of ``torch`` holds ``args`` (a Namespace), ``model``, ``checkpoint_version``, and training state that is not
read. Tensors have the names of the legacy models (``language_model...``) or of megatron-core. Beside the names, the
order of the fused q, k, v rows differs: it depends on the file's ``checkpoint_version``, within the shard of each rank.
In ``torch_dist`` one tensor holds those of all layers, [layers, ...], or each layer has its own.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from megatron01.checkpoint.manifest import TRACKER_NAME, iteration_folder
from megatron01.config import BertModelConfig, GPTModelConfig, TokenizerType
from megatron01.convert.portable import (
    GIVE_ONE,
    PortableModel,
    config_from,
    refuse_non_finite,
    require_plain,
    vocabulary_rows,
)
from megatron01.convert.torch_files import DistributedFiles, load_tensors
from megatron01.data.tokenizers import TokenizerFiles
from megatron01.errors import UserError
from megatron01.models.tensor_parallel import partitions_for
from megatron01.utils.files import read_json_object

_NORM = r"(?:layer)?norm"
_STACK = r"(?:language_model\.)?(?:transformer|encoder|decoder)\."
_LAYER = rf"{_STACK}layers\.(\d+)\."
_OURS = r"transformer.layers.\1."
_RULES = {  # name of a module there, up to "weight" or "bias" -> name here
    r"(?:language_model\.)?embedding\.(word|position|tokentype)_embeddings\.(?=weight)": r"embedding.\1_embeddings.",
    rf"{_LAYER}input_{_NORM}\.": rf"{_OURS}attention_norm.",
    rf"{_LAYER}self_attention\.linear_qkv\.layer_norm_": rf"{_OURS}attention_norm.",
    rf"{_LAYER}(?:self_)?attention\.(?:query_key_value|linear_qkv)\.": rf"{_OURS}attention.query_key_value.",
    rf"{_LAYER}(?:self_)?attention\.(?:dense|linear_proj)\.": rf"{_OURS}attention.dense.",
    rf"{_LAYER}(?:post_attention_{_NORM}|pre_mlp_layernorm)\.": rf"{_OURS}mlp_norm.",
    rf"{_LAYER}mlp\.linear_fc1\.layer_norm_": rf"{_OURS}mlp_norm.",
    rf"{_LAYER}mlp\.(?:dense_h_to_4h|linear_fc1)\.": rf"{_OURS}mlp.dense_h_to_4h.",
    rf"{_LAYER}mlp\.(?:dense_4h_to_h|linear_fc2)\.": rf"{_OURS}mlp.dense_4h_to_h.",
    rf"{_STACK}final_{_NORM}\.": "transformer.final_norm.",
    r"lm_head\.dense\.": "lm_head.dense.",
    r"lm_head\.(?:layernorm|layer_norm|norm)\.": "lm_head.norm.",
    r"(?:lm_head|output_layer)\.(?=bias)": "lm_head.",
    r"(?:language_model\.)?pooler\.dense\.": "pooler.dense.",
    r"binary_head\.": "binary_head.",
}
_IGNORED = re.compile(r".*_extra_state|word_embeddings_for_head\.weight")  # buffers of kernels; a copy for pipelines


def _joined(
    ranks: Sequence[Mapping[str, Tensor]], config: GPTModelConfig | BertModelConfig, *, version: float, source: str
) -> dict[str, Tensor]:
    """The whole weights, joined from those of all tensor-parallel ranks in order, which are partitioned as here.

    Raises UserError if the shards of the ranks do not match.
    """
    head_size = config.hidden_size // config.num_attention_heads
    partitions = partitions_for(config, ranks[0])
    joined: dict[str, Tensor] = {}
    for name, first in ranks[0].items():
        if any(name not in rank for rank in ranks):
            raise UserError(f"{source}: {name} is not in the files of all ranks; expected those of one checkpoint")
        shards = [rank[name] for rank in ranks]
        try:
            if ".query_key_value." in name:
                shards = [_grouped_by_head(shard, head_size, version) for shard in shards]
            if name in partitions:
                joined[name] = torch.cat(shards, partitions[name].dim)
            elif all(torch.equal(shard, first) for shard in shards):
                joined[name] = first
            else:
                raise UserError(f"{source}: {name} differs between the ranks, but is not divided between them")
        except (RuntimeError, IndexError) as error:
            raise UserError(f"{source}: {name} has shape {list(first.shape)}, which does not fit ({error})") from error
    return joined


def _renamed(model: Mapping[str, Any], source: str) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in _flattened(model, ""):
        if _IGNORED.fullmatch(name):
            continue
        matches = ((re.fullmatch(rf"{theirs}(?P<end>weight|bias)", name), ours) for theirs, ours in _RULES.items())
        ours = next((match.expand(rf"{ours}\g<end>") for match, ours in matches if match is not None), None)
        if ours is None or not isinstance(tensor, Tensor):
            raise UserError(
                f"{source} holds {name}, which BERT and GPT-2 as they are here do not have; expected one of these two"
                " models of Megatron-LM"
            )
        require_plain(ours, tensor, source)
        renamed[ours] = tensor
    return renamed


def _flattened(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Entries of nested dictionaries, with names joined by dots and DDP's ``module.`` removed."""
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping):
            yield from _flattened(inner, f"{name}.")
        else:
            yield name.replace("module.", ""), inner


def _grouped_by_head(rows: Tensor, head_size: int, version: float) -> Tensor:
    """Fused q, k, v rows [3 * heads * head size, ...] of one rank, reordered to version 2's [heads, 3, head size]."""
    if version >= 2:
        return rows
    if version >= 1:  # [heads, head size, 3]
        rows = rows.unflatten(0, (-1, head_size, 3)).transpose(1, 2)
    else:  # [3, heads, head size]
        rows = rows.unflatten(0, (3, -1, head_size)).transpose(0, 1)
    return rows.flatten(0, 2)


_FILES = ("model_optim_rng.pt", "model_rng.pt")
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_STAND_INS = ("megatron", "apex", "amp_C", "transformer_engine", "fp16", "numpy", "torch", "types", "signal", "_io")
_NEWEST_VERSION = 3.0
_TRAINING_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.|rng_state|rerun_state|opt_param_scheduler")
_ALL_LAYERS = re.compile(r"(.*\.layers\.)((?!\d+\.).*)")  # one tensor for the layers of all, in torch_dist

# Settings of Megatron-LM, and the only supported value of each, checked where a file has the setting.
_REQUIRED: dict[str, Any] = {
    "apply_residual_connection_post_layernorm": False,
    "apply_residual_connection_post_norm": False,
    "apply_layernorm_1p": False,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "use_rotary_position_embeddings": False,
    "add_position_embedding": True,
    "untie_embeddings_and_output_weights": False,
    "add_bias_linear": True,
    "swiglu": False,
    "squared_relu": False,
    "group_query_attention": False,
    "multi_latent_attention": False,
    "num_experts": None,
    "pipeline_model_parallel_size": 1,
}


def is_megatron(path: Path) -> bool:
    """True if a path looks like a checkpoint of Megatron-LM, a folder of them, or one of their files."""
    if path.is_file():
        return path.suffix == ".pt"
    places = ("", "iter_*/", "release/")
    return any(any(path.glob(f"{place}{name}")) for place in places for name in ("mp_rank_*/*.pt", ".metadata"))


def read_megatron(path: Path, tokenizer: TokenizerFiles | None = None) -> PortableModel:
    """The model of a checkpoint of Megatron-LM; nothing in its files is executed.

    Raises UserError if a file is missing or damaged, or its model is not supported.

    Args:
        path: a folder of checkpoints, one of them, or a single rank's file.
        tokenizer: used in place of the files that the checkpoint's ``args`` name.
    """
    place = _iteration(path)
    if (place / ".metadata").is_file():
        states, source = [_distributed_state(place)], str(place)
    else:
        paths = _rank_files(place)
        states = [load_tensors(file, stand_ins=_STAND_INS) for file in paths]
        source = str(place if len(paths) > 1 else paths[0])
        for file, state in zip(paths, states, strict=True):
            if not isinstance(state, Mapping) or not isinstance(state.get("model"), Mapping):
                raise UserError(
                    f"{file} has no entry 'model'; expected a checkpoint of Megatron-LM without virtual stages"
                )
    args, version = _arguments(states[0], source), _version(states[0], source)
    world = getattr(args, "tensor_model_parallel_size", getattr(args, "model_parallel_size", len(states)))
    if world != len(states):
        raise UserError(
            f"{source} was written with tensor parallelism {world}, but {len(states)} rank(s) are there; give the"
            " folder with the mp_rank_... folders of all"
        )
    try:
        ranks = [_renamed(state["model"], source) for state in states]
    except RecursionError as error:
        raise UserError(f"{source} holds dictionaries that are nested too deeply; it is damaged") from error
    config = _config(args, is_bert="lm_head.dense.weight" in ranks[0], source=source)
    weights = _joined(ranks, config, version=version, source=source)
    rows, multiple = vocabulary_rows(weights), getattr(args, "make_vocab_size_divisible_by", None)
    if multiple is not None and multiple > rows:
        raise UserError(
            f"{source} has make_vocab_size_divisible_by {multiple} in its args, but {rows} rows of word embeddings;"
            " expected a multiple of it"
        )
    files = tokenizer or _tokenizer_files(args, source)
    model = PortableModel(
        source=source,
        config=config,
        vocab_size=rows,
        weights=weights,
        tokenizer=files,
        notes=_notes(args, is_bert=isinstance(config, BertModelConfig)),
    ).for_tokenizer(files.built)
    model.without_weights()  # checks shapes against the settings
    refuse_non_finite(weights, source)
    return model


def _iteration(path: Path) -> Path:
    """The folder of the checkpoint that the tracker in ``path`` names; ``path`` itself if there is none."""
    tracker = path / TRACKER_NAME
    if tracker.is_file():
        name = tracker.read_text(encoding="ascii", errors="replace").strip()
        if name != "release" and not name.isdecimal():
            raise UserError(f"{tracker} holds {name[:40]!r}; expected the number of an iteration, or release")
        return path / name if name == "release" else iteration_folder(path, int(name))
    return path


def _distributed_state(folder: Path) -> dict[str, Any]:
    """A torch_dist checkpoint as the state of one rank, which holds the parts of all, without optimizer."""
    expected = "expected a finished checkpoint that Megatron-LM wrote with --ckpt-format torch_dist or torch"
    if not (folder / "metadata.json").is_file():  # written last
        raise UserError(f"{folder} has no metadata.json, so its save was not finished; {expected}")
    kind = read_json_object(folder / "metadata.json", expected=expected).get("sharded_backend")
    if kind != "torch_dist":
        raise UserError(f"{folder} is in the format {kind!r}; {expected}")
    files = DistributedFiles(folder)
    newer = [name for name in files.objects if name.partition("/")[0] == "common_state"]
    if newer:
        common = files.object(newer[0], stand_ins=_STAND_INS)
        if isinstance(common, list) and len(common) == 1:
            common = common[0]
    else:
        common = load_tensors(folder / "common.pt", stand_ins=_STAND_INS)
    if not isinstance(common, Mapping):
        raise UserError(f"{folder} holds no state beside its tensors; {expected}")
    model: dict[str, Tensor] = {}
    for name in files.shapes:
        if _TRAINING_STATE.match(name):
            continue
        tensor = files.tensor(name)
        if match := _ALL_LAYERS.fullmatch(name):
            model.update({f"{match[1]}{layer}.{match[2]}": weight for layer, weight in enumerate(tensor)})
        else:
            model[name] = tensor
    if isinstance(args := common.get("args"), argparse.Namespace):
        args.tensor_model_parallel_size = args.pipeline_model_parallel_size = 1
    return {**common, "model": model}


def _rank_files(place: Path) -> list[Path]:
    """The files of all tensor-parallel ranks, in order: those in a folder, or a single one."""
    if place.is_file():
        return [place]
    ranks = {}
    for entry in place.glob("mp_rank_*"):
        match = _RANK.fullmatch(entry.name)
        file = next((entry / name for name in _FILES if (entry / name).is_file()), None)
        if match is None or file is None:
            raise UserError(
                f"{entry} holds no {_FILES[0]}; expected a checkpoint that Megatron-LM wrote with torch.save"
            )
        if int(match[2] or 0) > 0:
            raise UserError(
                f"{place} is divided into pipeline stages ({entry.name}); merge them with Megatron-LM's tools first"
            )
        ranks[int(match[1])] = file
    if sorted(ranks) != list(range(len(ranks))) or not ranks:
        raise UserError(f"{place} has the ranks {sorted(ranks)}; expected mp_rank_00 and all that follow it")
    return [ranks[rank] for rank in sorted(ranks)]


def _arguments(state: Mapping[str, Any], source: str) -> argparse.Namespace:
    args = state.get("args")
    if not isinstance(args, argparse.Namespace):
        raise UserError(
            f"{source} holds no args, so the shape of its model is not known; expected Megatron-LM's settings"
        )
    for name, wanted in _REQUIRED.items():
        value = getattr(args, name, wanted)
        if value != wanted:
            raise UserError(f"{source} was trained with {name} {value!r}; models here have {wanted!r} only")
    return args


def _version(state: Mapping[str, Any], source: str) -> float:
    version = state.get("checkpoint_version", 0)
    if isinstance(version, bool) or not isinstance(version, (int, float)) or not 0 <= version <= _NEWEST_VERSION:
        raise UserError(f"{source} has checkpoint_version {version!r}; expected 0 to {_NEWEST_VERSION}")
    return float(version)


def _number(args: argparse.Namespace, name: str, source: str) -> int:
    value = getattr(args, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{source} has {name} {value!r} in its args; expected a positive number")
    return value


def _real(args: argparse.Namespace, name: str, source: str) -> float:
    value = getattr(args, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 2**63:  # NaN included
        raise UserError(f"{source} has {name} {value!r} in its args; expected a number")
    return float(value)


def _config(args: argparse.Namespace, *, is_bert: bool, source: str) -> GPTModelConfig | BertModelConfig:
    heads, hidden = _number(args, "num_attention_heads", source), _number(args, "hidden_size", source)
    head_size = getattr(args, "kv_channels", None)
    if head_size not in (None, hidden // heads):
        raise UserError(f"{source} has kv_channels {head_size!r}; models here have hidden_size / num_attention_heads")
    whole = ["num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"]
    if getattr(args, "ffn_hidden_size", None) is not None:
        whole.append("ffn_hidden_size")
    shape: dict[str, Any] = {name: _number(args, name, source) for name in whole}
    epsilon = "layernorm_epsilon" if hasattr(args, "layernorm_epsilon") else "norm_epsilon"
    shape["layernorm_epsilon"] = _real(args, epsilon, source) if hasattr(args, epsilon) else 1e-5
    for name in ("init_method_std", "hidden_dropout", "attention_dropout"):
        if getattr(args, name, None) is not None:
            shape[name] = _real(args, name, source)
    if getattr(args, "make_vocab_size_divisible_by", None) is not None:
        shape["make_vocab_size_divisible_by"] = _number(args, "make_vocab_size_divisible_by", source)
    if is_bert:
        return config_from(source, BertModelConfig, **shape, norm_placement="pre")
    return config_from(source, GPTModelConfig, **shape)


def _tokenizer_files(args: argparse.Namespace, source: str) -> TokenizerFiles:
    kind = getattr(args, "tokenizer_type", None)
    names = ("vocab_file", "merge_file", "tokenizer_model")
    files = {name: value for name in names if isinstance(value := getattr(args, name, None), str) and value}
    if kind not in get_args(TokenizerType) or not files or not all(Path(file).exists() for file in files.values()):
        raise UserError(
            f"{source} was trained with the tokenizer {kind} of {', '.join(files.values()) or 'unknown files'}, which"
            f" cannot be used from here; {GIVE_ONE}"
        )
    return TokenizerFiles(tokenizer_type=kind, **files)  # type: ignore[arg-type]


def _notes(args: argparse.Namespace, *, is_bert: bool) -> tuple[str, ...]:
    """Warnings where the trained model's computation differs slightly from the one here (form of GELU)."""
    tanh = bool(getattr(args, "bias_gelu_fusion", False) or getattr(args, "openai_gelu", False))
    if tanh == (not is_bert) or not hasattr(args, "bias_gelu_fusion"):
        return ()
    trained, here = ("tanh", "exact") if is_bert else ("exact", "tanh")
    return (
        f"it was trained with the {trained} form of GELU in its MLPs and models here have the {here} one, which differs"
        " by up to 5e-4 in each activation: expect slightly other logits",
    )
