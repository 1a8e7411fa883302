from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch

from megatron01.checkpoint.manifest import METADATA_NAME, describe_file, read_metadata
from megatron01.config.yaml_files import load_plain_yaml
from megatron01.convert.formats import read_model
from megatron01.convert.native import read_checkpoint, write_checkpoint
from megatron01.data.tokenizers import TokenizerFiles
from megatron01.errors import UserError
from tests.integration.tiny import bert_config, gpt_config
from tests.unit.checkpoint.saved import flip_bit
from tests.unit.convert.trained import save_trained


@pytest.mark.parametrize("optimizer", ["zero_one_adam", "adam", "sgdm"])
@pytest.mark.parametrize("make", [gpt_config, bert_config])
def test_the_weights_are_those_of_the_last_synchronization(corpus, tmp_path, make, optimizer):
    config = make(corpus, optimizer=optimizer)
    expected = save_trained(config, tmp_path)
    model = read_checkpoint(str(tmp_path))
    assert model.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(model.weights[name], tensor), name
    assert model.config == config.model
    assert model.vocab_size == {gpt_config: 257, bert_config: 21}[make]
    model.build()


def test_weights_alone_come_back_to_the_bit(gpt_checkpoint, bert_checkpoint, pre_norm_checkpoint, tmp_path):
    for number, source in enumerate((gpt_checkpoint, bert_checkpoint, pre_norm_checkpoint)):
        original = read_checkpoint(str(source))
        folder = tmp_path / str(number)
        folder.mkdir()
        checkpoint = write_checkpoint(original, folder, final=folder)
        assert read_metadata(checkpoint).iteration == 0
        again = read_checkpoint(str(folder))
        assert again.config == original.config and again.vocab_size == original.vocab_size
        expected = original.padded_weights()  # training changed the padding rows; these are not restored
        assert all(torch.equal(again.weights[name], tensor) for name, tensor in expected.items())
        assert again.built_tokenizer().fingerprint == original.built_tokenizer().fingerprint


def test_weights_of_16_bits_become_fp32(gpt_checkpoint, tmp_path):
    original = read_checkpoint(str(gpt_checkpoint))
    rounded = {name: tensor.half() for name, tensor in original.padded_weights().items()}
    model = dataclasses.replace(original, weights=rounded)
    assert {parameter.dtype for parameter in model.build().parameters()} == {torch.float32}
    write_checkpoint(model, tmp_path, final=tmp_path)
    again = read_checkpoint(str(tmp_path)).weights
    assert all(again[name].dtype == torch.float32 and torch.equal(again[name], rounded[name].float()) for name in again)


def test_a_moved_folder_keeps_its_tokenizer(gpt_checkpoint, tmp_path):
    (tmp_path / "before").mkdir()
    write_checkpoint(read_checkpoint(str(gpt_checkpoint)), tmp_path / "before", final=tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    assert read_checkpoint(str(tmp_path / "after")).vocab_size == 257
    (tmp_path / "after" / "tokenizer" / "merges.txt").unlink()  # then none of its files is taken from there
    with pytest.raises(UserError, match=r"with the tokenizer .*before/tokenizer/\w+.\w+, which does not exist"):
        read_checkpoint(str(tmp_path / "after"))


def test_rows_without_a_token_are_padding_up_to_a_point(gpt_checkpoint):
    model = read_checkpoint(str(gpt_checkpoint))
    tokenizer = model.built_tokenizer()
    larger = dataclasses.replace(model.config, make_vocab_size_divisible_by=4096)
    for config, most in ((model.config, 1023), (larger, 4095)):
        rows = dataclasses.replace(model, config=config, vocab_size=257 + most)
        assert rows.for_tokenizer(tokenizer).vocab_size == 257
        for num_rows in (257 + most + 1, 256):
            with pytest.raises(UserError, match=f"257 ids and the model in .* has rows for {num_rows}; give the"):
                dataclasses.replace(rows, vocab_size=num_rows).for_tokenizer(tokenizer)


def test_a_tokenizer_that_is_not_there_is_named(corpus, tmp_path):
    moved = tmp_path / "vocabularies"
    shutil.copytree(corpus, moved)
    save_trained(gpt_config(moved), tmp_path / "saved")
    shutil.rmtree(moved)
    with pytest.raises(UserError, match=r"vocab.json, which does not exist .* give --tokenizer-type GPT2BPETokenizer"):
        read_checkpoint(str(tmp_path / "saved"))
    files = TokenizerFiles(
        tokenizer_type="GPT2BPETokenizer", vocab_file=str(corpus / "vocab.json"), merge_file=str(corpus / "merges.txt")
    )
    assert read_checkpoint(str(tmp_path / "saved"), files).vocab_size == 257


def test_another_vocabulary_is_refused(bert_checkpoint, corpus, tmp_path):
    other = tmp_path / "vocab.txt"
    other.write_text((corpus / "vocab.txt").read_text().replace("fox", "ox"))
    files = TokenizerFiles(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(other))
    with pytest.raises(UserError, match="is not the vocabulary with which"):
        read_checkpoint(str(bert_checkpoint), files)


def test_the_same_vocabulary_in_other_files_for_weights_alone(gpt_checkpoint, corpus, tmp_path):
    """As transformers 5 saves it: a tokenizer.json alone, without the vocabulary that a run's data was made with."""
    model = read_checkpoint(str(gpt_checkpoint))
    (tmp_path / "tokenizer.json").write_text(model.built_tokenizer().definition)
    files = TokenizerFiles(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "tokenizer.json"))
    (tmp_path / "weights").mkdir()
    write_checkpoint(dataclasses.replace(model, tokenizer=files), tmp_path / "weights", final=tmp_path / "weights")
    assert read_checkpoint(str(tmp_path / "weights"), model.tokenizer).tokenizer == model.tokenizer
    with pytest.raises(UserError, match="is not the vocabulary with which"):
        read_checkpoint(str(gpt_checkpoint), files)  # of a run
    with pytest.raises(UserError, match="encodes text differently from the model's own"):
        bert = TokenizerFiles(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(corpus / "vocab.txt"))
        read_checkpoint(str(tmp_path / "weights"), bert)


def test_weights_alone_without_a_tokenizer(gpt_checkpoint, tmp_path):
    original = read_checkpoint(str(gpt_checkpoint))
    write_checkpoint(dataclasses.replace(original, tokenizer=None), tmp_path, final=tmp_path)
    with pytest.raises(UserError, match="holds no tokenizer; give --tokenizer-type"):
        read_checkpoint(str(tmp_path))
    again = read_checkpoint(str(tmp_path), original.tokenizer)
    assert again.vocab_size == 257 and again.tokenizer == original.tokenizer


def test_weights_alone_say_whether_they_have_the_head_for_sentence_pairs(bert_checkpoint, tmp_path):
    original = read_checkpoint(str(bert_checkpoint))
    words = {name: tensor for name, tensor in original.weights.items() if "pooler" not in name and "binary" not in name}
    for weights, objective in ((original.weights, "sop"), (words, "none")):
        folder = tmp_path / objective
        folder.mkdir()
        model = dataclasses.replace(original, weights=weights)
        settings = load_plain_yaml(write_checkpoint(model, folder, final=folder) / "config.yaml")
        assert settings["data"]["objective"] == objective
        assert read_checkpoint(str(folder)).has_binary_head == (objective == "sop")


def test_vocabulary_files_of_one_name_are_both_copied(gpt_checkpoint, corpus, tmp_path):
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).mkdir()
        shutil.copyfile(corpus / name, tmp_path / name / "gpt2.txt")
    files = TokenizerFiles(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(tmp_path / "vocab.json" / "gpt2.txt"),
        merge_file=str(tmp_path / "merges.txt" / "gpt2.txt"),
    )
    model = dataclasses.replace(read_checkpoint(str(gpt_checkpoint)), tokenizer=files)
    (tmp_path / "weights").mkdir()
    write_checkpoint(model, tmp_path / "weights", final=tmp_path / "weights")
    shutil.rmtree(tmp_path / "merges.txt")
    assert read_checkpoint(str(tmp_path / "weights")).built_tokenizer().fingerprint == files.built.fingerprint


def test_special_tokens_that_stand_beside_a_tokenizer_json_are_copied(gpt_checkpoint, tmp_path):
    original, theirs = read_checkpoint(str(gpt_checkpoint)), tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "tokenizer.json").write_text(original.built_tokenizer().definition)
    (theirs / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    files = TokenizerFiles(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(theirs))
    (end,) = original.built_tokenizer().encode("!")
    (tmp_path / "weights").mkdir()
    model = dataclasses.replace(original, tokenizer=files)
    write_checkpoint(model, tmp_path / "weights", final=tmp_path / "weights")
    shutil.rmtree(theirs)
    assert read_checkpoint(str(tmp_path / "weights")).built_tokenizer().eod == end


def test_somebodys_own_model_is_refused_in_one_sentence(gpt_checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(gpt_checkpoint, copy)
    (checkpoint,) = copy.glob("iter_*")
    metadata = read_metadata(checkpoint)
    assert metadata.model == "GPT2"
    for name in ("my_package.MyModel", ""):
        (checkpoint / METADATA_NAME).write_text(dataclasses.replace(metadata, model=name).to_json())
        for read in (read_checkpoint, read_model):
            with pytest.raises(UserError, match=r"only the models of this package \(GPT2, Bert\)") as caught:
                read(str(copy))
            assert (name or "unknown class") in str(caught.value) and "\n" not in str(caught.value)


def test_settings_of_training_may_be_those_of_another_version(gpt_checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(gpt_checkpoint, copy)
    rewrite(copy, lambda text: text + "laundry:\n  starch: 3\n")
    assert read_checkpoint(str(copy)).vocab_size == 257


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("num_layers: 2", "num_layers: 3"), "lacks transformer.layers.2"),
        (lambda text: text.replace("num_layers: 2", "num_strata: 2"), "num_strata"),
        (lambda text: text.replace("num_layers: 2", "num_layers: 10000"), "says num_layers 10000, but holds"),
        (lambda text: re.sub(r"(hidden_size): 32", r"\1: 64", text), r"has shape \[264, 32\]"),
        (lambda text: re.sub(r"(max_position\w+): \d+", r"\1: 1000", text), r"and \[1000, 32\] here"),
        (lambda text: "model: []\n", "does not hold the settings"),
        (lambda text: "[", "not valid YAML"),
    ],
)
def test_settings_that_do_not_fit_are_refused(gpt_checkpoint, tmp_path, change, message):
    copy = tmp_path / "copy"
    shutil.copytree(gpt_checkpoint, copy)
    rewrite(copy, change)
    with pytest.raises(UserError, match=message):
        read_checkpoint(str(copy))


def test_the_block_size_and_kernels_of_training_do_not_matter(gpt_checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(gpt_checkpoint, copy)
    rewrite(copy, lambda text: text.replace("block_size: 64", "block_size: 128"))
    rewrite(copy, lambda text: re.sub(r"fused_layernorm: \w+", "fused_layernorm: apex", text))
    assert read_checkpoint(str(copy)).config == read_checkpoint(str(gpt_checkpoint)).config
    expected = read_checkpoint(str(gpt_checkpoint)).weights
    found = read_checkpoint(str(copy)).weights
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


def rewrite(folder: Path, change) -> None:
    """Change the settings of the checkpoint in a folder and update their hash."""
    (checkpoint,) = folder.glob("iter_*")
    path = checkpoint / "config.yaml"
    metadata = read_metadata(checkpoint)
    path.write_text(change(path.read_text()))
    files = {**metadata.files, path.name: describe_file(path)}
    (checkpoint / METADATA_NAME).write_text(dataclasses.replace(metadata, files=files).to_json())


@pytest.mark.parametrize(
    ("name", "position"), [("rank_00000.safetensors", 5000), ("rank_00000.safetensors", -50), ("config.yaml", -2)]
)
def test_damage_is_found(gpt_checkpoint, tmp_path, name, position):
    """In the header of a file, in a tensor, or in the settings."""
    copy = tmp_path / "copy"
    shutil.copytree(gpt_checkpoint, copy)
    (data,) = copy.glob(f"iter_*/{name}")
    flip_bit(data, position)
    with pytest.raises(UserError, match="is damaged: its content"):
        read_checkpoint(str(copy))


def test_copies_of_a_checkpoint(gpt_checkpoint, tmp_path):
    with pytest.raises(UserError, match="not a folder"):
        read_checkpoint(str(tmp_path / "none"))
    copy = tmp_path / "copy"
    shutil.copytree(gpt_checkpoint / "iter_0000011", copy / "iter_0000011")  # without the tracker file
    assert read_model(str(copy)).source == read_model(str(copy / "iter_0000011")).source
    shutil.copytree(gpt_checkpoint / "iter_0000011", tmp_path / "best")
    with pytest.raises(UserError, match=r"best is a checkpoint under a name of its own; rename it to iter_"):
        read_model(str(tmp_path / "best"))
