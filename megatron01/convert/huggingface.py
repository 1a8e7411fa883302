"""Import and export of Hugging Face models: ``config.json``, weights in safetensors files, tokenizer files.

GPT-2 <-> ``GPT2LMHeadModel``, post-norm BERT <-> ``BertForPreTraining``, pre-norm <-> ``MegatronBertForPreTraining``. A
model that is not supported is refused, naming the setting in ``config.json``: nothing is approximated silently.

Three things differ beside the names of tensors: the fused q, k, v rows here are ordered [heads, 3, head size] (there:
three tensors, or for GPT-2 one ordered [3, heads, head size]); GPT-2's linear layers there hold transposed weights;
word embeddings and vocabulary bias here are padded. Padding is stripped on export and restored, as zeros, on import.
Dtypes are kept, and tensors may share memory with those they are made from.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron01.config import BertModelConfig, GPTModelConfig, Precision
from megatron01.convert.hf_tokenizer import find_tokenizer, write_json, write_tokenizer
from megatron01.convert.portable import (
    PortableModel,
    config_from,
    non_finite,
    refuse_non_finite,
    require_plain,
    with_rows,
)
from megatron01.convert.torch_files import load_tensors
from megatron01.data.tokenizers import Tokenizer, TokenizerFiles
from megatron01.errors import UserError
from megatron01.models.base import padded_vocab_size
from megatron01.utils.files import read_json_object
from megatron01.utils.precision import DTYPES, dtype_name

Config = GPTModelConfig | BertModelConfig
Kind = Literal["same", "transposed", "vocabulary", "fused_transposed", "separate"]


class _Tensors(NamedTuple):
    """Name of a module (weight and bias) or tensor here and in transformers, and how the layouts differ.

    ``#`` stands for the layer's number; ``*`` for query, key and value.
    """

    ours: str
    theirs: str
    kind: Kind = "same"


_GPT2_TENSORS = (
    _Tensors("embedding.word_embeddings.weight", "transformer.wte.weight", "vocabulary"),
    _Tensors("embedding.position_embeddings.weight", "transformer.wpe.weight"),
    _Tensors("transformer.layers.#.attention_norm", "transformer.h.#.ln_1"),
    _Tensors("transformer.layers.#.attention.query_key_value", "transformer.h.#.attn.c_attn", "fused_transposed"),
    _Tensors("transformer.layers.#.attention.dense", "transformer.h.#.attn.c_proj", "transposed"),
    _Tensors("transformer.layers.#.mlp_norm", "transformer.h.#.ln_2"),
    _Tensors("transformer.layers.#.mlp.dense_h_to_4h", "transformer.h.#.mlp.c_fc", "transposed"),
    _Tensors("transformer.layers.#.mlp.dense_4h_to_h", "transformer.h.#.mlp.c_proj", "transposed"),
    _Tensors("transformer.final_norm", "transformer.ln_f"),
)


def _bert_tensors(attention_norm: str, mlp_norm: str, last_norm: _Tensors) -> tuple[_Tensors, ...]:
    """The tensors of a BERT; names and places of norms differ between the post-norm and the pre-norm model."""
    return (
        _Tensors("embedding.word_embeddings.weight", "bert.embeddings.word_embeddings.weight", "vocabulary"),
        _Tensors("embedding.position_embeddings.weight", "bert.embeddings.position_embeddings.weight"),
        _Tensors("embedding.tokentype_embeddings.weight", "bert.embeddings.token_type_embeddings.weight"),
        _Tensors("transformer.layers.#.attention.query_key_value", "bert.encoder.layer.#.attention.self.*", "separate"),
        _Tensors("transformer.layers.#.attention.dense", "bert.encoder.layer.#.attention.output.dense"),
        _Tensors("transformer.layers.#.mlp.dense_h_to_4h", "bert.encoder.layer.#.intermediate.dense"),
        _Tensors("transformer.layers.#.mlp.dense_4h_to_h", "bert.encoder.layer.#.output.dense"),
        _Tensors("transformer.layers.#.attention_norm", f"bert.encoder.layer.#.{attention_norm}"),
        _Tensors("transformer.layers.#.mlp_norm", f"bert.encoder.layer.#.{mlp_norm}"),
        last_norm,
        _Tensors("lm_head.dense", "cls.predictions.transform.dense"),
        _Tensors("lm_head.norm", "cls.predictions.transform.LayerNorm"),
        _Tensors("lm_head.bias", "cls.predictions.bias", "vocabulary"),
    )


_BINARY_HEAD_TENSORS = (_Tensors("pooler.dense", "bert.pooler.dense"), _Tensors("binary_head", "cls.seq_relationship"))
_TIED_IN_BERT = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".position_ids", ".token_type_ids")


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """A supported model type of transformers."""

    name: str  # of the class there, without its head
    settings: dict[str, tuple[str, Any]]  # name here -> (name there, default there)
    required: dict[str, tuple[Any, ...]]  # settings there -> the supported values, the default first
    tensors: tuple[_Tensors, ...]  # of the model, without BERT's head for sentence pairs
    tied: dict[str, str]  # names of tied tensors in the state dict there: copy -> original


_BERT_SETTINGS = {
    "num_layers": ("num_hidden_layers", 12),
    "hidden_size": ("hidden_size", 768),
    "num_attention_heads": ("num_attention_heads", 12),
    "ffn_hidden_size": ("intermediate_size", 3072),
    "max_position_embeddings": ("max_position_embeddings", 512),
    "layernorm_epsilon": ("layer_norm_eps", 1e-12),
    "init_method_std": ("initializer_range", 0.02),
    "hidden_dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
}
_BERT_REQUIRED = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "type_vocab_size": (2,),
    "hidden_act": ("gelu", "gelu_python"),
}
_ARCHITECTURES = {
    "gpt2": _Architecture(
        name="GPT2",
        settings={
            "num_layers": ("n_layer", 12),
            "hidden_size": ("n_embd", 768),
            "num_attention_heads": ("n_head", 12),
            "ffn_hidden_size": ("n_inner", None),
            "max_position_embeddings": ("n_positions", 1024),
            "layernorm_epsilon": ("layer_norm_epsilon", 1e-5),
            "init_method_std": ("initializer_range", 0.02),
            "hidden_dropout": ("resid_pdrop", 0.1),
            "attention_dropout": ("attn_pdrop", 0.1),
        },
        required={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),  # three spellings of one function
        },
        tensors=_GPT2_TENSORS,
        tied={"lm_head.weight": "transformer.wte.weight"},
    ),
    "bert": _Architecture(
        name="Bert",
        settings=_BERT_SETTINGS,
        required=_BERT_REQUIRED,
        tensors=_bert_tensors(
            "attention.output.LayerNorm", "output.LayerNorm", _Tensors("embedding.norm", "bert.embeddings.LayerNorm")
        ),
        tied=_TIED_IN_BERT,
    ),
    "megatron-bert": _Architecture(
        name="MegatronBert",
        settings=_BERT_SETTINGS
        | {
            "num_layers": ("num_hidden_layers", 24),
            "hidden_size": ("hidden_size", 1024),
            "num_attention_heads": ("num_attention_heads", 16),
            "ffn_hidden_size": ("intermediate_size", 4096),
        },
        required=_BERT_REQUIRED,
        tensors=_bert_tensors("attention.ln", "ln", _Tensors("transformer.final_norm", "bert.encoder.ln")),
        tied=_TIED_IN_BERT,
    ),
}


def _model_type(config: Config) -> str:
    if isinstance(config, BertModelConfig):
        return "bert" if config.norm_placement == "post" else "megatron-bert"
    return "gpt2"


def to_hf_config(
    config: Config, vocab_size: int, *, binary_head: bool = True, eod: int | None = None, pad: int | None = 0
) -> dict[str, Any]:
    """The entries of ``config.json`` for the tensors of ``hf_tensors``; ``eod`` is for GPT-2, ``pad`` for BERT."""
    model_type = _model_type(config)
    architecture = _ARCHITECTURES[model_type]
    sizes = {theirs: getattr(config, ours) for ours, (theirs, _) in architecture.settings.items()}
    sizes[architecture.settings["ffn_hidden_size"][0]] = config.feed_forward_size
    if isinstance(config, BertModelConfig):
        head = "ForPreTraining" if binary_head else "ForMaskedLM"
        others = {"hidden_act": "gelu", "type_vocab_size": 2, "pad_token_id": pad}
    else:
        head = "LMHeadModel"
        others = {"activation_function": "gelu_new", "embd_pdrop": config.hidden_dropout}
        others |= {"bos_token_id": eod, "eos_token_id": eod}
    names = {"architectures": [architecture.name + head], "model_type": model_type, "vocab_size": vocab_size}
    return names | sizes | others


def from_hf_config(entries: Mapping[str, Any], source: str) -> tuple[Config, int]:
    """Model settings and vocabulary size for the entries of a ``config.json``.

    Raises UserError, which names ``source``, if the model is not supported, or an entry is missing or out of range.
    """
    kind = entries.get("model_type")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise UserError(
            f"{source} has model_type {kind!r}; expected gpt2, bert or megatron-bert, the architectures that megatron01"
            " has (in files of 2019, which have none, add it)"
        )
    architecture = _ARCHITECTURES[kind]
    if "quantization_config" in entries:
        raise UserError(f"{source} has a quantization_config; expected weights in fp32, bf16 or fp16")
    for name, allowed in architecture.required.items():
        value = entries.get(name, allowed[0])
        if value not in allowed:
            raise UserError(f"{name} is {value!r} in {source}; models here have {allowed[0]!r} only")
    settings: dict[str, Any] = {}
    for ours, (theirs, default) in architecture.settings.items():
        value = entries.get(theirs, default)
        if value is None and default is None:
            continue
        wanted = float if isinstance(default, float) else int
        is_number = isinstance(value, (int, wanted)) and not isinstance(value, bool)
        if not is_number or not abs(value) < 2**63:  # infinity and NaN included
            raise UserError(f"{theirs} is {value!r} in {source}; expected a number")
        settings[ours] = wanted(value)
    num_ids = entries.get("vocab_size")
    if isinstance(num_ids, bool) or not isinstance(num_ids, int) or num_ids < 1:
        raise UserError(f"vocab_size is {num_ids!r} in {source}; expected a positive number")
    if kind == "gpt2":
        return config_from(source, GPTModelConfig, **settings), num_ids
    settings["norm_placement"] = "post" if kind == "bert" else "pre"
    return config_from(source, BertModelConfig, **settings), num_ids


def _all_tensors(config: Config, *, binary_head: bool) -> list[_Tensors]:
    """All tensors of a model, with layer numbers and ``.weight`` or ``.bias`` filled in."""
    rows = _ARCHITECTURES[_model_type(config)].tensors + (_BINARY_HEAD_TENSORS if binary_head else ())
    placed = [(row, "") for row in rows if "#" not in row.ours]
    placed += [(row, str(layer)) for layer in range(config.num_layers) for row in rows if "#" in row.ours]
    return [
        _Tensors(f"{row.ours}{end}".replace("#", layer), f"{row.theirs}{end}".replace("#", layer), row.kind)
        for row, layer in placed
        for end in (("",) if row.ours.endswith((".weight", ".bias")) else (".weight", ".bias"))
    ]


def _their_names(theirs: str) -> list[str]:
    """The name itself, or the three of query, key and value if it has a ``*``."""
    return [theirs.replace("*", part) for part in ("query", "key", "value")] if "*" in theirs else [theirs]


def hf_tensors(weights: Mapping[str, Tensor], config: Config, vocab_size: int) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a file of transformers, one after the other; tied tensors once.

    For a BERT without a sentence-pair head, those of the ``...ForMaskedLM`` class: no pooler, no
    ``cls.seq_relationship``. ``weights`` are those of ``GPT2.state_dict()`` or ``Bert.state_dict()``. Raises UserError
    if a tensor is missing or unexpected.
    """
    tensors = _all_tensors(config, binary_head="binary_head.weight" in weights)
    _check_names(weights, [row.ours for row in tensors], "megatron01")
    for ours, theirs, kind in tensors:
        tensor = weights[ours]
        if kind == "vocabulary":
            tensor = tensor[:vocab_size]
        elif kind in ("separate", "fused_transposed"):
            tensor = _swap_heads_and_three(tensor, config.num_attention_heads, 3)
        if kind in ("transposed", "fused_transposed") and tensor.ndim == 2:
            tensor = tensor.t()
        names = _their_names(theirs)
        yield from zip(names, tensor.contiguous().chunk(len(names)), strict=True)


def from_hf(state: Mapping[str, Tensor], config: Config, vocab_size: int | None = None) -> dict[str, Tensor]:
    """Weights by megatron01's names from a state dict of transformers, of any release, or of a GPT-2 without its head.

    Raises UserError if a tensor is missing, unexpected or quantized, if tensors that are tied here differ there, or if
    there are not ``vocab_size`` rows of the vocabulary (None: any number).
    """
    if config.num_layers > len(state):  # before names for so many layers are built
        raise UserError(f"the config says {config.num_layers} layers, but there are {len(state)} Hugging Face weights")
    is_bert = isinstance(config, BertModelConfig)
    left = {}
    for name, tensor in state.items():
        if is_bert:  # the first releases called the norms' parameters gamma and beta
            name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        elif not name.startswith(("transformer.", "lm_head.")):  # published GPT-2 files are without the head
            name = f"transformer.{name}"
        if not name.endswith(_BUFFERS):
            require_plain(name, tensor, "the Hugging Face weights")
            left[name] = tensor
    for name, original in _ARCHITECTURES[_model_type(config)].tied.items():
        copy = left.pop(name, None)
        if copy is not None and original in left and not torch.equal(copy, left[original]):
            raise UserError(
                f"{name} and {original} differ in the Hugging Face weights; models here use one tensor for both"
                " (untied embeddings are not supported)"
            )
    binary_head = "cls.seq_relationship.weight" in left
    if not binary_head:  # then the pooler is not used in pretraining
        left.pop("bert.pooler.dense.weight", None)
        left.pop("bert.pooler.dense.bias", None)
    tensors = _all_tensors(config, binary_head=binary_head)
    _check_names(left, [name for row in tensors for name in _their_names(row.theirs)], "Hugging Face")
    imported: dict[str, Tensor] = {}
    for ours, theirs, kind in tensors:
        found = [left[name] for name in _their_names(theirs)]
        try:
            imported[ours] = _imported(found, kind, config, vocab_size).contiguous()
        except RuntimeError as error:
            raise UserError(
                f"{_their_names(theirs)[0]} has shape {list(found[0].shape)} in the Hugging Face weights, which does"
                f" not fit its config ({error})"
            ) from error
    return imported


def _imported(tensors: list[Tensor], kind: Kind, config: Config, vocab_size: int | None) -> Tensor:
    """A tensor in the layout here from one of transformers, or from query, key and value, [hidden size, ...] each."""
    tensor = torch.cat(tensors)
    if kind in ("transposed", "fused_transposed") and tensor.ndim == 2:
        tensor = tensor.t()
    if kind in ("separate", "fused_transposed"):
        return _swap_heads_and_three(tensor, 3, config.num_attention_heads)
    if kind == "vocabulary":
        num_ids = tensor.shape[0]
        if vocab_size not in (None, num_ids):
            raise RuntimeError(f"{num_ids} rows for {vocab_size} ids")
        return with_rows(tensor, num_ids, padded_vocab_size(num_ids, config.make_vocab_size_divisible_by))
    return tensor


def _check_names(found: Collection[str], expected: Sequence[str], source: str) -> None:
    """Raises UserError if a tensor is missing or unexpected."""
    if leftovers := set(found) - set(expected):
        raise UserError(
            f"the {source} weights have {len(leftovers)} tensors that a model of the given shape does not have,"
            f" such as {min(leftovers)!r}; expected the weights of that architecture and number of layers alone"
        )
    for name in expected:
        if name not in found:
            is_head = name.startswith("cls.predictions")
            hint = "; a BERT without its masked-token head cannot be pretrained further" if is_head else ""
            raise UserError(f"the {source} weights lack {name!r}, which a model of the given shape has{hint}")


def _swap_heads_and_three(tensor: Tensor, first: int, second: int) -> Tensor:
    """Rows of a tensor [first * second * head size, ...], any dtype, reordered to [second, first, head size]."""
    output: Tensor = tensor.unflatten(0, (first, second, -1)).transpose(0, 1).flatten(0, 2)
    return output


CONFIG_FILE = "config.json"
_SAFETENSORS = "model.safetensors"
_PICKLED = "pytorch_model.bin"
_LFS_POINTER = b"version https://git-lfs"
_FILE = "a file of transformers"
SAMPLE_TEXT = "The Quick brown fox isn't jumping over 1234567890 sleepy dogs; \u00c9tienne, in (old) Z\u00fcrich: yes!"


def is_hf_folder(path: Path) -> bool:
    """True if a path looks like a model of transformers."""
    return (path / CONFIG_FILE).is_file()


def read_hf_folder(path: Path, tokenizer: TokenizerFiles | None = None) -> PortableModel:
    """The model in a folder of transformers; nothing in it is executed.

    Weights are read from ``model.safetensors``, its shards, or ``pytorch_model.bin`` (tensors only). A ``tokenizer``
    takes the place of the one in the folder. Raises UserError if a file is missing or damaged, or if the model is not
    supported or holds NaN or infinities.
    """
    config_file = path / CONFIG_FILE
    entries = read_json_object(config_file, expected=_FILE)
    config, num_ids = from_hf_config(entries, str(config_file))
    weights = from_hf(read_weights(path), config, num_ids)
    refuse_non_finite(weights, str(path))
    own = find_tokenizer(path, model_type=_model_type(config), num_ids=num_ids)
    files = tokenizer or own
    model = PortableModel(source=str(path), config=config, vocab_size=num_ids, weights=weights, tokenizer=files)
    model.without_weights()  # checks shapes against the settings
    notes = []
    embedding_dropout = entries.get("embd_pdrop", 0.1)
    if isinstance(config, GPTModelConfig) and embedding_dropout != config.hidden_dropout:
        notes.append(
            f"embd_pdrop is {embedding_dropout!r} and resid_pdrop {config.hidden_dropout} in {config_file}; models here"
            f" have one rate for both, and hidden_dropout becomes {config.hidden_dropout} (trained models compute the"
            " same; training on differs after the embedding)"
        )
    if files is not None:
        built = files.built
        if tokenizer is not None and own is not None:
            require_same_rules(built, own.built)
        model = model.for_tokenizer(built)
        if built.vocab_size < num_ids:
            notes.append(
                f"{num_ids - built.vocab_size} rows of {path}'s vocabulary of {num_ids} have no token in {built.name};"
                " they are left out as padding"
            )
    return replace(model, notes=tuple(notes))


def require_same_rules(given: Tokenizer, own: Tokenizer) -> None:
    """Check that a given tokenizer encodes text as the model's own does.

    Raises UserError if its vocabulary size differs, or its ids for a sample text.
    """
    if given.vocab_size != own.vocab_size or given.encode(SAMPLE_TEXT) != own.encode(SAMPLE_TEXT):
        raise UserError(
            f"{given.name} ({given.vocab_size} ids) encodes text differently from the model's own {own.name}"
            f" ({own.vocab_size} ids); give the tokenizer with which the model was trained"
        )


def write_hf_folder(model: PortableModel, folder: Path, *, dtype: Precision) -> list[str]:
    """Write a folder from which ``AutoModel`` and ``AutoTokenizer`` load without a network; returns notes for the user.

    The folder exists and is empty. Needs memory for a copy of the weights.
    """
    notes = []
    eod, pad = None, 0
    if model.tokenizer is not None:
        tokenizer = model.tokenizer.built
        note = write_tokenizer(model.tokenizer, folder, max_length=model.config.max_position_embeddings)
        notes += [note] if note else []
        eod, pad = tokenizer.eod, 0 if tokenizer.masking is None else tokenizer.masking.pad
    entries = to_hf_config(model.config, model.vocab_size, binary_head=model.has_binary_head, eod=eod, pad=pad)
    write_json(folder / CONFIG_FILE, entries | {"dtype": dtype_name(DTYPES[dtype])})
    if isinstance(model.config, GPTModelConfig):
        write_json(folder / "generation_config.json", {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": eod})
    tensors = hf_tensors(model.weights, model.config, model.vocab_size)
    # copies: safetensors refuses names that share memory
    cast = {name: tensor.to(DTYPES[dtype], copy=True) for name, tensor in tensors}
    save_file(cast, folder / _SAFETENSORS, metadata={"format": "pt"})
    shutil.copymode(folder / CONFIG_FILE, folder / _SAFETENSORS)  # it is created so that only its owner can read it
    if damaged := non_finite(cast):
        notes.append(
            f"{len(damaged)} tensors, such as {min(damaged)}, hold NaN or infinite elements: they are too large for"
            f" {dtype}, or training has diverged"
        )
    return notes


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by name; files are memory-mapped, so that only tensors that are used take memory.

    Raises UserError if there are none, or a file is damaged.
    """
    for name in (_SAFETENSORS, _PICKLED):
        whole, index = folder / name, folder / f"{name}.index.json"
        if not index.is_file() and not whole.is_file():
            continue
        weights: dict[str, Tensor] = {}
        for file in [whole] if whole.is_file() else _shards(index):  # transformers leaves the index of old shards there
            try:
                with open(file, "rb") as opened:
                    is_pointer = opened.read(len(_LFS_POINTER)) == _LFS_POINTER
                if is_pointer:
                    raise UserError(f"{file} is a pointer of Git LFS, not the weights; run git lfs pull there")
                contents = load_file(file) if name == _SAFETENSORS else load_tensors(file)
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file} is damaged or not a safetensors file ({error}); copy it again") from error
            if not isinstance(contents, Mapping) or not all(isinstance(tensor, Tensor) for tensor in contents.values()):
                raise UserError(f"{file} does not hold tensors by name; expected weights that transformers has saved")
            weights |= contents
        return weights
    raise UserError(f"{folder} holds no {_SAFETENSORS} and no {_PICKLED}; expected the weights of the model")


def _shards(index: Path) -> list[Path]:
    """The shard files that an index names, in its own folder."""
    weight_map = read_json_object(index, expected=_FILE).get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, Mapping) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(f"{index} names no files of this folder; expected an index of weights")
    return [index.with_name(name) for name in sorted(names)]
