"""Checkpoints in the formats of Megatron-LM, written by these tests."""

from __future__ import annotations

import argparse
import dataclasses
import pickle
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron01.convert.formats import read_model
from megatron01.convert.megatron import _tokenizer_files, is_megatron, read_megatron
from megatron01.data.tokenizers import TokenizerFiles
from megatron01.errors import UserError

CORE = {
    "attention_norm": "input_layernorm",
    "attention.query_key_value": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
CORE_FUSED_NORMS = CORE | {
    "attention_norm": "self_attention.linear_qkv.layer_norm_",
    "mlp_norm": "mlp.linear_fc1.layer_norm_",
}
OLD = {
    "attention_norm": "input_layernorm",
    "attention.query_key_value": "attention.query_key_value",
    "attention.dense": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.dense_h_to_4h": "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h": "mlp.dense_4h_to_h",
}
NEWER_OLD = OLD | {
    "attention_norm": "input_norm",
    "mlp_norm": "post_attention_norm",
    "attention.query_key_value": "self_attention.query_key_value",
    "attention.dense": "self_attention.dense",
}


def shard_of(name: str, tensor: torch.Tensor, rank: int, ranks: int, *, heads: int, version: float) -> torch.Tensor:
    """The shard of a tensor on one rank."""
    if "query_key_value" in name:
        rows = tensor.unflatten(0, (heads, 3, -1)).chunk(ranks)[rank]  # (heads of this rank, 3, head size, ...)
        if version == 0:
            rows = rows.movedim(1, 0)  # (3, heads, head size)
        elif version == 1:
            rows = rows.movedim(1, 2)  # (heads, head size, 3)
        return rows.flatten(0, 2).clone()
    if name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
        return tensor.chunk(ranks, 1)[rank].clone()
    if (
        name.endswith(("word_embeddings.weight", "dense_h_to_4h.weight", "dense_h_to_4h.bias"))
        or name == "lm_head.bias"
    ):
        return tensor.chunk(ranks)[rank].clone()
    return tensor.clone()


def old_tree(tensors: dict[str, torch.Tensor], names: dict[str, str], stack: str) -> dict:
    """Nested dictionaries, as in versions before megatron-core."""
    embedding: dict = {}
    model: dict = {"language_model": {"embedding": embedding, stack: {}}}
    for name, tensor in tensors.items():
        if name.startswith("embedding."):
            _, table, leaf = name.split(".")
            embedding[table] = {leaf: tensor}
        elif name.startswith("transformer.layers."):
            _, _, index, rest = name.split(".", 3)
            module, leaf = rest.rsplit(".", 1)
            model["language_model"][stack][f"layers.{index}.{names[module]}.{leaf}"] = tensor
        elif name.startswith("transformer.final_norm"):
            norm = "final_norm" if names is NEWER_OLD else "final_layernorm"
            model["language_model"][stack][f"{norm}.{name.rsplit('.', 1)[1]}"] = tensor
        elif name.startswith("pooler."):
            model["language_model"].setdefault("pooler", {})[name.removeprefix("pooler.")] = tensor
        else:
            head, rest = name.split(".", 1)
            model.setdefault(head, {})[rest.replace("norm.", "layernorm.")] = tensor
    return model


def core_tree(tensors: dict[str, torch.Tensor], names: dict[str, str], stack: str) -> dict:
    """Flat names, as in megatron-core."""
    model: dict = {"decoder.layers.0.self_attention.core_attention._extra_state": None}
    for name, tensor in tensors.items():
        if name.startswith("transformer.layers."):
            _, _, index, rest = name.split(".", 3)
            module, leaf = rest.rsplit(".", 1)
            theirs = names[module]
            joined = f"{theirs}{leaf}" if theirs.endswith("_") else f"{theirs}.{leaf}"
            model[f"{stack}.layers.{index}.{joined}"] = tensor
        elif name.startswith("transformer.final_norm"):
            model[name.replace("transformer.final_norm", f"{stack}.final_layernorm")] = tensor
        elif name == "lm_head.bias":
            model["output_layer.bias"] = tensor
        else:
            model[name.replace("lm_head.norm", "lm_head.layer_norm")] = tensor
    return model


def arguments(model, **changes) -> argparse.Namespace:
    config, files = model.config, model.tokenizer
    values = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "layernorm_epsilon": config.layernorm_epsilon,
        "make_vocab_size_divisible_by": config.make_vocab_size_divisible_by,
        "tokenizer_type": files.tokenizer_type,
        "vocab_file": files.vocab_file,
        "merge_file": files.merge_file,
        "params_dtype": torch.float16,
        "apply_query_key_layer_scaling": True,
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": False,
    }
    return argparse.Namespace(**(values | changes))


def write(
    folder: Path,
    model,
    *,
    tree=old_tree,
    names=None,
    stack="transformer",
    version=3.0,
    ranks=1,
    legacy=False,
    **changes,
):
    """A checkpoint of Megatron-LM with the weights of ``model``."""
    args = arguments(model, tensor_model_parallel_size=ranks, **changes)
    for rank in range(ranks):
        heads = model.config.num_attention_heads
        tensors = {
            name: shard_of(name, tensor, rank, ranks, heads=heads, version=version)
            for name, tensor in model.weights.items()
        }
        state = {
            "args": args,
            "iteration": 7,
            "model": tree(tensors, names or OLD, stack),
            "np_rng_state": np.random.RandomState(0).get_state(),
            "optimizer": {"state": {0: torch.zeros(3)}},
        }
        if version > 0:
            state["checkpoint_version"] = version
        path = folder / "iter_0000007" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def assert_same(found, expected) -> None:
    assert found.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        assert torch.equal(found.weights[name], tensor), name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("source", ["gpt", "bert"])
def test_every_version_and_number_of_ranks(source, version, ranks, tmp_path, request):
    model = request.getfixturevalue(source)
    write(tmp_path, model, version=version, ranks=ranks, legacy=version == 0)
    found = read_model(str(tmp_path))
    assert_same(found, model)
    assert found.config.norm_placement == "pre" if source == "bert" else True
    assert found.vocab_size == model.vocab_size and found.architecture == model.architecture
    assert found.notes == ()
    built, expected = found.build().eval(), model.build().eval()
    ids = torch.arange(5)[None]
    inputs = (ids, ids * 0, ids * 0 + 1) if source == "bert" else (ids,)
    outputs = built(*inputs), expected(*inputs)
    assert torch.equal(outputs[0][0], outputs[1][0])


@pytest.mark.parametrize("backwards", [False, True])
def test_ranks_may_be_listed_in_any_order(gpt, tmp_path, monkeypatch, backwards):
    write(tmp_path, gpt, ranks=2)
    listed = Path.glob
    monkeypatch.setattr(Path, "glob", lambda *arguments: sorted(listed(*arguments), reverse=backwards))
    assert_same(read_model(str(tmp_path)), gpt)


@pytest.mark.parametrize(
    ("tree", "names", "stack"),
    [
        (old_tree, NEWER_OLD, "encoder"),
        (core_tree, CORE, "decoder"),
        (core_tree, CORE_FUSED_NORMS, "encoder"),
    ],
)
def test_names_of_all_times(tree, names, stack, gpt, bert, tmp_path):
    for number, model in enumerate((gpt, bert)):
        write(tmp_path / str(number), model, tree=tree, names=names, stack=stack, ranks=2)
        assert_same(read_megatron(tmp_path / str(number)), model)


def test_one_file_or_a_release(gpt, tmp_path):
    write(tmp_path, gpt)
    file = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    assert_same(read_megatron(file), gpt)
    (tmp_path / "iter_0000007").rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert is_megatron(tmp_path)
    assert_same(read_megatron(tmp_path), gpt)
    assert_same(read_megatron(tmp_path / "release"), gpt)


def test_a_file_without_optimizer_and_a_copy_of_the_embedding(gpt, tmp_path):
    """As with Megatron-LM's distributed optimizer, and for the last stage of a pipeline."""
    write(tmp_path, gpt)
    path = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["word_embeddings_for_head"] = {"weight": torch.ones(2)}
    torch.save(state, path.with_name("model_rng.pt"))
    path.unlink()
    assert_same(read_megatron(tmp_path), gpt)


def test_settings_are_taken_over(gpt, tmp_path):
    rows = len(gpt.weights["embedding.word_embeddings.weight"])
    shape = {"ffn_hidden_size": 4 * gpt.config.hidden_size, "make_vocab_size_divisible_by": rows}
    rates = {"init_method_std": 0.25, "hidden_dropout": 0.5, "attention_dropout": 0.75}
    write(tmp_path, gpt, norm_epsilon=0.125, vocab_file="/none/vocab.json", **shape, **rates)
    path = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    del state["args"].layernorm_epsilon  # the earlier name
    torch.save(state, path)
    expected = dataclasses.replace(gpt.config, layernorm_epsilon=0.125, **shape, **rates)
    assert read_megatron(tmp_path, gpt.tokenizer).config == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("apply_residual_connection_post_layernorm", True),
        ("apply_residual_connection_post_norm", True),
        ("apply_layernorm_1p", True),
        ("use_rotary_position_embeddings", True),
        ("add_position_embedding", False),
        ("add_bias_linear", False),
        ("squared_relu", True),
        ("group_query_attention", True),
        ("multi_latent_attention", True),
        ("swiglu", True),
        ("normalization", "RMSNorm"),
        ("position_embedding_type", "rope"),
        ("untie_embeddings_and_output_weights", True),
        ("num_experts", 8),
        ("kv_channels", 3),
        ("hidden_size", None),
        ("num_attention_heads", 0),
        ("layernorm_epsilon", None),
        ("layernorm_epsilon", "1e-5"),
        ("layernorm_epsilon", float("inf")),
        ("init_method_std", float("inf")),
        ("hidden_dropout", "0.1"),
        ("make_vocab_size_divisible_by", 2.5),
        ("make_vocab_size_divisible_by", 10**9),  # in place of allocating so many rows
        ("tensor_model_parallel_size", 2),
        ("pipeline_model_parallel_size", 2),
    ],
)
def test_what_is_not_here_is_refused_by_name(name, value, gpt, tmp_path):
    write(tmp_path, gpt)
    path = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    setattr(state["args"], name, value)
    torch.save(state, path)
    with pytest.raises(UserError, match="tensor parallelism" if name.startswith("tensor") else name):
        read_megatron(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("args"), "holds no args"),
        (lambda state: state.pop("model"), "no entry 'model'"),
        (lambda state: state.update(checkpoint_version=4.0), "checkpoint_version 4.0"),
        (lambda state: state["model"].update(vision=torch.zeros(2)), "holds vision"),
        (lambda state: state["model"].update(lm_head={"bias": torch.ones(258)}), r"holds lm_head\.bias of shape"),
        (lambda state: state["model"].update(lm_head={"dense.weight": torch.zeros(2)}), "is of another model"),
        (
            lambda state: vars(state["args"]).update(
                model_parallel_size=2 * vars(state["args"]).pop("tensor_model_parallel_size")
            ),
            "tensor parallelism 2, but 1 rank",  # as it was called at first
        ),
        (lambda state: state["args"].__dict__.update(num_layers=3), "lacks transformer.layers.2"),
        (lambda state: state["args"].__dict__.update(num_layers=10**4), "num_layers 10000, but holds"),
        (lambda state: state["args"].__dict__.update(max_position_embeddings=2**63), "100000000, in .*model_optim"),
        (
            lambda state: state["model"]["language_model"]["transformer"].update(
                {"final_layernorm.weight": torch.ones(32, dtype=torch.int8)}
            ),
            "transformer.final_norm.weight in .* is int8",
        ),
        (lambda state: [state["model"].clear(), state["model"].update(model=state["model"])], "nested too deeply"),
        (lambda state: state["args"].__dict__.update(num_attention_heads=1), None),
        (lambda state: state["args"].__dict__.update(vocab_file="/none/vocab.json"), "give --tokenizer-type"),
        (lambda state: state["args"].__dict__.update(tokenizer_type="Fancy"), "the tokenizer Fancy"),
        (
            lambda state: state["model"]["language_model"]["embedding"]["word_embeddings"]["weight"].fill_(torch.nan),
            "NaN or infinite elements in embedding.word_embeddings.weight",
        ),
    ],
)
def test_damaged_checkpoints_are_named(change, message, gpt, tmp_path):
    write(tmp_path, gpt)
    path = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)
    if message is None:  # another number of heads is another model, which no shape reveals
        assert read_megatron(tmp_path).config.num_attention_heads == 1
        return
    with pytest.raises(UserError, match=message):
        read_megatron(tmp_path)


def test_ranks_that_do_not_belong_together(gpt, tmp_path):
    write(tmp_path, gpt, ranks=2)
    path = tmp_path / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["language_model"]["transformer"]["final_layernorm.bias"] += 1
    torch.save(state, path)
    with pytest.raises(UserError, match=r"final_norm.bias differs between the ranks"):
        read_megatron(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=r"mp_rank_01 holds no model_optim_rng.pt"):
        read_megatron(tmp_path)
    path.parent.rename(path.parent.with_name("mp_rank_02"))
    torch.save(state, path.parent.with_name("mp_rank_02") / "model_optim_rng.pt")
    with pytest.raises(UserError, match=r"ranks \[0, 2\]"):
        read_megatron(tmp_path)
    path.parent.with_name("mp_rank_02").rename(path.parent.with_name("mp_rank_00_001"))
    with pytest.raises(UserError, match="pipeline stages"):
        read_megatron(tmp_path)


def test_the_other_form_of_gelu_is_noted(gpt, bert, tmp_path):
    write(tmp_path / "bert", bert, bias_gelu_fusion=True)
    assert "with the tanh form of GELU" in read_megatron(tmp_path / "bert").notes[0]
    write(tmp_path / "openai", bert, bias_gelu_fusion=False, openai_gelu=True)
    assert "with the tanh form of GELU" in read_megatron(tmp_path / "openai").notes[0]
    write(tmp_path / "gpt", gpt, bias_gelu_fusion=False, openai_gelu=False)
    assert "with the exact form of GELU" in read_megatron(tmp_path / "gpt").notes[0]
    write(tmp_path / "usual", gpt, bias_gelu_fusion=True)
    assert read_megatron(tmp_path / "usual").notes == ()


def with_class(module: str, name: str, monkeypatch) -> object:
    """An instance of a class that is pickled under this name."""
    kind = type(name, (), {"__module__": module, "__qualname__": name})
    parents = module.split(".")
    for length in range(1, len(parents) + 1):
        package = types.ModuleType(".".join(parents[:length]))
        setattr(package, name, kind)
        monkeypatch.setitem(sys.modules, package.__name__, package)
    return kind()


@pytest.mark.parametrize("legacy", [False, True])
def test_objects_of_training_do_not_matter(gpt, tmp_path, monkeypatch, legacy):
    """Loss scalers, enumerations and other objects of packages that are not installed are ignored."""
    scaler = with_class("megatron.fp16.loss_scaler", "DynamicLossScaler", monkeypatch)
    scaler.scale = 2.0
    write(tmp_path, gpt, model_type=scaler, legacy=legacy)
    monkeypatch.undo()
    assert_same(read_megatron(tmp_path), gpt)


class Evil:
    def __reduce__(self):
        return subprocess.call, (["touch", "executed"],)


class EvilEval:
    def __reduce__(self):
        return eval, ("__import__('pathlib').Path('executed').touch()",)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("evil", [Evil(), EvilEval()])
def test_a_pickle_is_never_run(gpt, tmp_path, monkeypatch, evil, legacy):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, gpt, extra=evil, legacy=legacy)
    with pytest.raises(UserError, match=r"an object of \S*(call|eval), which is not data"):
        read_megatron(tmp_path)
    assert not Path("executed").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04broken", pickle.dumps({"a": 1}), b"\x80\x02" * 50])
def test_files_that_torch_did_not_save(content, tmp_path):
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"model.pt is damaged or was not written by torch.save"):
        read_megatron(tmp_path / "model.pt")


def test_the_file_of_a_tokenizer_without_vocabulary_is_taken_over(tmp_path):
    path = tmp_path / "spiece.model"
    path.touch()
    names = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(path)}
    assert _tokenizer_files(argparse.Namespace(vocab_file=None, **names), "saved") == TokenizerFiles(**names)


def test_what_is_none_of_these(tmp_path):
    with pytest.raises(UserError, match="holds no model in a known format"):
        read_model(str(tmp_path))
    with pytest.raises(UserError, match="does not exist"):
        read_model(str(tmp_path / "none"))
