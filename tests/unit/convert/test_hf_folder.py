"""Exported folders load in transformers, and folders that transformers saved are read."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron01.convert.formats import load_model
from megatron01.convert.huggingface import read_hf_folder, write_hf_folder
from megatron01.convert.native import read_checkpoint
from megatron01.convert.portable import PortableModel
from megatron01.data import build_tokenizer
from megatron01.data.tokenizers import TokenizerFiles
from megatron01.errors import UserError
from tests.integration.tiny import bert_config
from tests.unit.convert.trained import save_trained


def export(model: PortableModel, folder: Path, **changes) -> list[str]:
    folder.mkdir()
    return write_hf_folder(model, folder, **({"dtype": "fp32"} | changes))


def load(name: str, folder: Path, **changes):
    """A model loaded by transformers, without missing or unexpected keys."""
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True, **changes)
    assert not any(info.values()), info
    return model.eval()


@pytest.fixture(scope="module")
def gpt_folder(gpt_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "gpt"
    assert export(read_checkpoint(str(gpt_checkpoint)), folder) == []
    return folder


@pytest.fixture(scope="module")
def bert_folder(bert_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "bert"
    assert export(read_checkpoint(str(bert_checkpoint)), folder) == []
    return folder


@pytest.fixture(scope="module")
def pre_norm_folder(pre_norm_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "pre_norm"
    assert export(read_checkpoint(str(pre_norm_checkpoint)), folder) == []
    return folder


def test_gpt2(gpt_folder, gpt_checkpoint):
    ours = load_model(str(gpt_checkpoint), device="cpu")
    theirs = load("AutoModelForCausalLM", gpt_folder)
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    assert type(load("AutoModel", gpt_folder)).__name__ == "GPT2Model"
    text = "seven boats sail home, \u00c9tienne!"
    tokenizer = transformers.AutoTokenizer.from_pretrained(gpt_folder)
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == ours.tokenizer.encode(text)
    assert tokenizer.decode(ids[0]) == text
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 256
    assert theirs.config.vocab_size == 257
    torch.testing.assert_close(theirs(ids).logits, ours.model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "name"),
    [("bert", "BertForPreTraining"), ("pre_norm", "MegatronBertForPreTraining")],
)
def test_bert(source, name, request):
    folder = request.getfixturevalue(f"{source}_folder")
    ours = load_model(str(request.getfixturevalue(f"{source}_checkpoint")), device="cpu")
    theirs = load(name, folder)
    assert type(load("AutoModelForPreTraining", folder)) is type(theirs)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pair = tokenizer("The quick fox jumps.", "A lazy dog [MASK] home", return_tensors="pt")
    encoded = [ours.tokenizer.encode(text) for text in ("The quick fox jumps.", "A lazy dog [MASK] home")]
    special = ours.tokenizer.masking
    assert pair.input_ids[0].tolist() == [special.cls, *encoded[0], special.sep, *encoded[1], special.sep]
    assert tokenizer.pad_token_id == theirs.config.pad_token_id == special.pad
    expected = ours.model(pair.input_ids, pair.token_type_ids, pair.attention_mask)
    found = theirs(**pair)
    torch.testing.assert_close(found.prediction_logits, expected.lm_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.seq_relationship_logits, expected.sentence_logits, rtol=1e-5, atol=1e-5)
    # a model without heads: only the keys of the heads are unexpected, and none is missing
    _, info = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert {name.split(".")[0] for name in info.pop("unexpected_keys")} == {"cls"}
    assert not any(info.values())


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_bert_without_the_head_for_sentence_pairs(corpus, tmp_path, placement):
    save_trained(bert_config(corpus, objective="none", norm_placement=placement), tmp_path / "saved", steps=2)
    original = read_checkpoint(str(tmp_path / "saved"))
    export(original, tmp_path / "hf")
    load("AutoModelForMaskedLM", tmp_path / "hf")
    assert read_hf_folder(tmp_path / "hf").weights.keys() == original.weights.keys()


@pytest.mark.parametrize("source", ["gpt", "bert", "pre_norm"])
def test_the_way_back_is_exact(source, tmp_path, request):
    original = read_checkpoint(str(request.getfixturevalue(f"{source}_checkpoint")))
    export(original, tmp_path / "hf")
    again = read_hf_folder(tmp_path / "hf")
    assert again.vocab_size == original.vocab_size
    for name, tensor in original.padded_weights().items():
        assert torch.equal(
            again.padded_weights(tensor.shape[0])[name]
            if "word" in name or name == "lm_head.bias"
            else again.weights[name],
            tensor,
        ), name
    assert again.built_tokenizer().fingerprint == original.built_tokenizer().fingerprint


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("bert", {"strip_accents": False}),
        ("bert", {"tokenize_chinese_chars": False}),
        ("gpt", {"add_prefix_space": True}),
        ("gpt", {}),
        ("bert", {}),
    ],
)
def test_a_tokenizer_with_other_rules_or_more_tokens(source, changes, tmp_path, request):
    """As transformers saves it beside the vocabulary from which it was made."""
    folder = tmp_path / "hf"
    shutil.copytree(request.getfixturevalue(f"{source}_folder"), folder)
    if source == "bert":
        with open(folder / "vocab.txt", "a", encoding="utf-8") as file:
            file.write("th\u00e9\n\u6771\u4eac\n\u6771\n\u4eac\n")
        (folder / "tokenizer.json").unlink()
    theirs = transformers.AutoTokenizer.from_pretrained(folder, **changes)
    if not changes:
        theirs.add_tokens(["<extra>"])
    theirs.save_pretrained(folder)
    model = transformers.AutoModelForPreTraining.from_pretrained(folder)
    model.resize_token_embeddings(len(theirs))
    model.save_pretrained(folder)
    ours = read_hf_folder(folder)
    text = "the th\u00e9 <extra> \u6771\u4eac The fox"
    expected = theirs(text, add_special_tokens=False).input_ids
    assert ours.built_tokenizer().encode(text) == expected
    assert (ours.vocab_size, ours.notes) == (len(theirs), ())


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_a_vocabulary_for_a_tokenizer_of_another_class(bert_folder, tmp_path, file):
    """Such as one that divides text into words in its own way; its ``tokenizer.json`` is followed if it has one."""
    folder = copy(bert_folder, tmp_path / "hf")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / file).write_text(
        json.dumps(json.loads((folder / file).read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"String": "x"},
        "behavior": "Removed", "invert": False}, definition["pre_tokenizer"]]}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = "thexfox"
    expected = theirs(text, add_special_tokens=False).input_ids
    assert len(expected) == 2 and read_hf_folder(folder).built_tokenizer().encode(text) == expected
    (folder / "tokenizer.json").unlink()
    assert read_hf_folder(folder).tokenizer is None


def test_the_fast_class_of_a_tokenizer_is_the_same(bert_folder, tmp_path):
    folder = copy(bert_folder, tmp_path / "hf")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "BertTokenizerFast"}))
    assert read_hf_folder(folder).tokenizer.tokenizer_type == "BertWordPieceLowerCase"


def test_settings_of_a_tokenizer_that_no_file_follows(bert_folder, tmp_path):
    shutil.copytree(bert_folder, tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"strip_accents": False}))
    for _ in range(2):
        with pytest.raises(UserError, match=r"tokenizer_config.json has strip_accents False, .* save the tokenizer"):
            read_hf_folder(tmp_path / "hf")
        (tmp_path / "hf" / "tokenizer.json").unlink(missing_ok=True)


def test_added_tokens_that_no_tokenizer_json_holds(gpt_folder, tmp_path):
    """As the slow tokenizers of transformers 4 were saved: their embeddings are trained ones, not padding."""
    folder = copy(gpt_folder, tmp_path / "hf")
    model = transformers.AutoModelForPreTraining.from_pretrained(folder)
    model.resize_token_embeddings(258)
    model.save_pretrained(folder)
    (folder / "added_tokens.json").write_text('{"<sep>": 257}')
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has an added_tokens.json and no tokenizer.json.* save the tokenizer again"):
        read_hf_folder(folder)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    assert read_hf_folder(folder).built_tokenizer().encode("<sep>") == [257]


@pytest.mark.parametrize("source", ["gpt", "bert", "pre_norm"])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_what_transformers_has_saved(source, shard_size, tmp_path, request):
    """Folders saved by transformers, of either model, with the tokenizer as it writes it."""
    folder = request.getfixturevalue(f"{source}_folder")
    expected = read_hf_folder(folder)
    theirs = load("AutoModelForPreTraining", folder)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    again = read_hf_folder(tmp_path)
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in expected.weights.items())
    tokenizer, text = again.built_tokenizer(), "The quick fox jumps"
    assert tokenizer.encode(text) == expected.built_tokenizer().encode(text)
    assert (tokenizer.eod, tokenizer.masking is None) == (expected.built_tokenizer().eod, source == "gpt")
    for path in tmp_path.glob("model*"):
        path.unlink()
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    assert all(torch.equal(read_hf_folder(tmp_path).weights[name], t) for name, t in expected.weights.items())
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert all(torch.equal(read_hf_folder(tmp_path).weights[name], t) for name, t in expected.weights.items())


def test_types(gpt_checkpoint, tmp_path):
    original = read_checkpoint(str(gpt_checkpoint))
    export(original, tmp_path / "bf16", dtype="bf16")
    theirs = load("AutoModelForCausalLM", tmp_path / "bf16")
    assert theirs.dtype == torch.bfloat16
    again = read_hf_folder(tmp_path / "bf16")
    for name, tensor in original.weights.items():
        rounded = tensor.bfloat16()
        rows = slice(0, 257 if name == "embedding.word_embeddings.weight" else None)
        assert torch.equal(again.weights[name][rows], rounded[rows]), name


def test_the_padding_token_is_that_of_the_vocabulary(bert_checkpoint, corpus, tmp_path):
    padding, *others = (corpus / "vocab.txt").read_text().splitlines()
    (tmp_path / "vocab.txt").write_text("\n".join([*others, padding]) + "\n")
    files = TokenizerFiles(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(tmp_path / "vocab.txt"))
    export(dataclasses.replace(read_checkpoint(str(bert_checkpoint)), tokenizer=files), tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["pad_token_id"] == len(others)


def test_a_vocabulary_of_both_cases(bert_checkpoint, corpus, tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text((corpus / "vocab.txt").read_text() + "The\nth\u00e9\n")
    original = read_checkpoint(str(bert_checkpoint))
    files = TokenizerFiles(tokenizer_type="BertWordPieceCase", vocab_file=str(path))
    export(dataclasses.replace(original, tokenizer=files, vocab_size=files.built.vocab_size), tmp_path / "hf")
    ids = build_tokenizer(files).encode("The fox the th\u00e9")
    assert files.built.unknown not in ids and len(set(ids)) >= 4
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs("The fox the th\u00e9", add_special_tokens=False).input_ids == ids
    config = tmp_path / "hf" / "tokenizer_config.json"
    for accents in (None, False):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"strip_accents": accents}))
        assert read_hf_folder(tmp_path / "hf").tokenizer.tokenizer_type == "BertWordPieceCase"


def test_all_files_of_a_folder_can_be_read_by_the_same_users(gpt_checkpoint, tmp_path):
    """The library of safetensors makes files for their owner alone."""
    export(read_checkpoint(str(gpt_checkpoint)), tmp_path / "hf")
    assert len({path.stat().st_mode for path in (tmp_path / "hf").iterdir()}) == 1


def test_weights_that_are_not_finite(gpt_checkpoint, tmp_path):
    original = read_checkpoint(str(gpt_checkpoint))
    original.weights["transformer.final_norm.bias"][3] = torch.inf
    (note,) = export(original, tmp_path / "hf")
    assert "1 tensors, such as transformer.ln_f.bias, hold NaN or infinite" in note
    with pytest.raises(UserError, match=r"1 NaN or infinite elements in transformer.final_norm.bias"):
        read_hf_folder(tmp_path / "hf")
    original.weights["transformer.final_norm.bias"][3] = 1e5
    (note,) = export(original, tmp_path / "fp16", dtype="fp16")
    assert "too large for fp16" in note


def test_more_layers_than_weights(gpt_folder, tmp_path):
    folder = copy(gpt_folder, tmp_path / "deep")
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | {"n_layer": 10**4}))
    with pytest.raises(UserError, match="10000 layers, but there are"):
        read_hf_folder(folder)


def test_a_width_that_no_tensor_has(gpt_folder, tmp_path):
    folder = copy(gpt_folder, tmp_path / "wide")
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(entries | {"n_embd": 10**9}))
    with pytest.raises(UserError, match=r"hidden_size is 1000000000; .*, in .*wide/config.json"):
        read_hf_folder(folder)


def copy(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def test_rows_for_no_token_are_padding(gpt_folder, tmp_path):
    folder = copy(gpt_folder, tmp_path / "padded")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.wte.weight"] = torch.nn.functional.pad(tensors["transformer.wte.weight"], (0, 0, 0, 63))
    save_file(tensors, folder / "model.safetensors")
    entries = json.loads((folder / "config.json").read_text())
    with pytest.raises(UserError, match="320 rows for 257 ids"):
        read_hf_folder(folder)
    (folder / "config.json").write_text(json.dumps(entries | {"vocab_size": 320}))
    model = read_hf_folder(folder)
    assert model.vocab_size == 257
    assert "63 rows" in model.notes[0]
    assert torch.equal(
        model.padded_weights()["embedding.word_embeddings.weight"][:257],
        read_hf_folder(gpt_folder).weights["embedding.word_embeddings.weight"][:257],
    )


def test_a_tokenizer_of_another_size_or_kind_is_refused(gpt_folder, bert_folder, corpus, tmp_path):
    words = TokenizerFiles(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(corpus / "vocab.txt"))
    with pytest.raises(UserError, match=r"vocab.txt \(21 ids\) encodes text differently from .* \(257 ids\)"):
        read_hf_folder(gpt_folder, words)
    other = tmp_path / "vocab.txt"
    other.write_text((corpus / "vocab.txt").read_text().replace("fox", "ox").replace("[UNK]\n", "[UNK]\nfox\n"))
    with pytest.raises(UserError, match="22 ids"):
        read_hf_folder(bert_folder, TokenizerFiles(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(other)))
    folder = copy(bert_folder, tmp_path / "larger")
    (folder / "vocab.txt").write_text((corpus / "vocab.txt").read_text() + "whale\n")
    with pytest.raises(UserError, match=r"22 ids and the model in .* 21"):
        read_hf_folder(folder)


def test_a_folder_without_a_tokenizer(gpt_folder, tmp_path):
    folder = copy(gpt_folder, tmp_path / "bare")
    for name in ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    model = read_hf_folder(folder)
    assert model.vocab_size == 257 and model.tokenizer is None
    with pytest.raises(UserError, match="holds no tokenizer; give --tokenizer-type"):
        model.built_tokenizer()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"[]", "not a JSON object"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b'{"model_type": "llama"}', "model_type 'llama'"),
        ("model.safetensors", b"", "damaged or not a safetensors file"),
        ("model.safetensors", b"\xff" * 64, "damaged or not a safetensors file"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../../etc/passwd"}}', "names no files of this folder"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "none.safetensors"}}', "none.safetensors is damaged"),
        ("model.safetensors.index.json", b'{"weight_map": 3}', "names no files of this folder"),
        ("vocab.json", b"{}", "vocab.json"),
    ],
)
def test_damaged_files_are_named(gpt_folder, tmp_path, name, content, message):
    folder = copy(gpt_folder, tmp_path / "damaged")
    if name.endswith(".index.json"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_hf_folder(folder)


def test_one_file_comes_before_shards(gpt_folder, tmp_path):
    """As in transformers, which leaves the index of earlier shards there when it saves a model as one file."""
    theirs = load("AutoModelForCausalLM", gpt_folder)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    old = {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    with torch.no_grad():
        theirs.transformer.ln_f.bias.fill_(0.5)
    theirs.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert read_hf_folder(tmp_path).weights["transformer.final_norm.bias"].eq(0.5).all()
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)
    assert read_hf_folder(tmp_path).weights["transformer.final_norm.bias"].eq(0.5).all()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_told_from_damage(gpt_folder, tmp_path, name):
    folder = copy(gpt_folder, tmp_path / "cloned")
    (folder / "model.safetensors").unlink()
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n")
    with pytest.raises(UserError, match=rf"{name} is a pointer of Git LFS, not the weights; run git lfs pull there"):
        read_hf_folder(folder)


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_a_pickle_is_never_run(gpt_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = copy(gpt_folder, tmp_path / "evil")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"an object of \S+, which is not data"):
        read_hf_folder(folder)
    assert not Path("executed").exists()
    torch.save([torch.zeros(3)], folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="does not hold tensors by name"):
        read_hf_folder(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=r"no model.safetensors and no pytorch_model.bin"):
        read_hf_folder(folder)


def test_a_tokenizer_json_goes_with_the_model(gpt_folder, tmp_path):
    """A tokenizer.json of another kind than the project writes is copied unchanged."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    transformers.AutoTokenizer.from_pretrained(gpt_folder).save_pretrained(theirs)
    files = TokenizerFiles(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(theirs))
    model = read_hf_folder(gpt_folder, files)
    export(model, tmp_path / "hf")
    text = "the quick brown fox"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer(text).input_ids == build_tokenizer(files).encode(text)
    assert tokenizer.eos_token_id == 256  # by the file beside it
    (theirs / "tokenizer_config.json").unlink()
    export(model, tmp_path / "without_config")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "without_config")
    assert tokenizer(text).input_ids == build_tokenizer(files).encode(text)


def test_a_dropout_of_its_own_behind_the_embedding_is_named(gpt_folder, tmp_path):
    shutil.copytree(gpt_folder, tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    assert read_hf_folder(tmp_path / "other").notes == ()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"embd_pdrop": 0.0, "resid_pdrop": 0.2}))
    model = read_hf_folder(tmp_path / "other")
    assert model.config.hidden_dropout == 0.2
    (note,) = model.notes
    assert note.startswith(f"embd_pdrop is 0.0 and resid_pdrop 0.2 in {config}; models here have one rate")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"embd_pdrop": "a\nb"}))
    (note,) = read_hf_folder(tmp_path / "other").notes
    assert note.startswith("embd_pdrop is 'a\\nb' and")
