"""``megatron01 convert`` as a user runs it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from megatron01.cli import main
from megatron01.convert.formats import new_folder, read_model
from megatron01.convert.native import read_checkpoint, write_checkpoint


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit status, output and errors of a command."""
    with pytest.raises(SystemExit) as ended:
        main(["convert", *map(str, arguments)])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def test_there_and_back(gpt_checkpoint, tmp_path, capsys):
    there, back = tmp_path / "there", tmp_path / "back"
    status, output, errors = run(capsys, "--load", gpt_checkpoint, "--save", there)
    assert (status, errors) == (0, "")
    assert "GPT-2 of 34.7k parameters, 2 layers, hidden size 32, 257 ids" in output
    assert f"wrote {there} (Hugging Face, fp32)" in output
    status, output, _ = run(capsys, "--load", there, "--save", back)
    assert (status, f"wrote {back} (megatron01, weights alone)" in output) == (0, True)
    original, again = read_checkpoint(str(gpt_checkpoint)), read_checkpoint(str(back))
    for name, tensor in again.weights.items():
        rows = slice(0, 257 if "word" in name else None)
        assert torch.equal(tensor[rows], original.weights[name][rows])
    assert str(back) in again.tokenizer.vocab_file  # not the folder to which it was exported first


def test_one_iteration_of_many(gpt_checkpoint, tmp_path, capsys):
    assert run(capsys, "--load", gpt_checkpoint / "iter_0000011", "--save", tmp_path / "hf", "--dtype", "fp16")[0] == 0
    assert read_model(str(tmp_path / "hf")).weights["transformer.final_norm.bias"].dtype == torch.float16


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_to_a_folder_is_followed(gpt_checkpoint, tmp_path, capsys, is_there):
    real, link, source = tmp_path / "real", tmp_path / "link", tmp_path / "source"
    link.symlink_to(real, target_is_directory=True)
    source.symlink_to(gpt_checkpoint, target_is_directory=True)
    if is_there:
        real.mkdir()
    assert run(capsys, "--load", source, "--save", link)[0] == 0
    assert link.is_symlink() and read_model(str(real)).architecture == "GPT-2"
    assert sorted(tmp_path.iterdir()) == [link, real, source]


def test_what_is_there_is_not_replaced(gpt_checkpoint, bert_checkpoint, tmp_path, capsys, monkeypatch):
    target = tmp_path / "target"
    target.mkdir()  # an empty folder may be written to
    assert run(capsys, "--load", gpt_checkpoint, "--save", target)[0] == 0
    before = sorted(path.name for path in target.iterdir())
    monkeypatch.chdir(target)
    for place in (target, "."):
        status, _, errors = run(capsys, "--load", bert_checkpoint, "--save", place)
        assert status == 2 and f"{target} exists; give another --output" in errors
    assert sorted(path.name for path in target.iterdir()) == before


@pytest.mark.parametrize("name", ["file", "missing/deeper"])
def test_places_that_cannot_be_written(gpt_checkpoint, tmp_path, capsys, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "missing").write_text("")
    status, _, errors = run(capsys, "--load", gpt_checkpoint, "--save", tmp_path / name)
    assert status == 2 and errors.count("\n") == 1 and "error: " in errors


def test_what_cannot_be_read_is_not_said_of_the_output(tmp_path, capsys):
    status, _, errors = run(capsys, "--load", tmp_path / ("x" * 300), "--save", tmp_path / "there")
    assert status == 2 and "x cannot be read: File name too long" in errors and "there" not in errors


@pytest.mark.parametrize("form", ["huggingface", "megatron01"])
def test_a_disk_that_takes_no_more(gpt_checkpoint, tmp_path, capsys, form):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        status, _, errors = run(capsys, "--load", gpt_checkpoint, "--save", tmp_path / "out", "--to", form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 2 and "cannot be written: " in errors and "File too large" in errors and errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "final") as folder:
        (folder / "config.json").write_text("new")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_megatron_goes_to_hugging_face_at_once(gpt_checkpoint, tmp_path, capsys):
    from tests.unit.convert.test_megatron import write

    write(tmp_path / "megatron", read_checkpoint(str(gpt_checkpoint)), ranks=2, version=1.0)
    assert run(capsys, "--load", tmp_path / "megatron", "--save", tmp_path / "hf", "--to", "huggingface")[0] == 0
    found, expected = read_model(str(tmp_path / "hf")), read_checkpoint(str(gpt_checkpoint))
    name = "transformer.layers.1.attention.query_key_value.weight"
    assert torch.equal(found.weights[name], expected.weights[name])


@pytest.mark.parametrize("form", ["auto", "megatron01"])
def test_a_type_that_the_format_lacks(gpt_checkpoint, tmp_path, capsys, form):
    assert run(capsys, "--load", gpt_checkpoint, "--save", tmp_path / "hf")[0] == 0
    arguments = ["--load", tmp_path / "hf", "--save", tmp_path / "x", "--to", form, "--dtype", "bf16"]
    status, _, errors = run(capsys, *arguments)
    assert status == 2 and not (tmp_path / "x").exists()
    assert errors == "error: dtype is bf16, and checkpoints here hold fp32; leave it out, or add --to huggingface\n"


def test_other_tokenizer_files_must_be_complete(gpt_checkpoint, tmp_path, capsys):
    status, _, errors = run(capsys, "--load", gpt_checkpoint, "--save", tmp_path / "hf", "--vocab-file", "v.json")
    assert status == 2 and "give --tokenizer-type" in errors


def test_a_model_without_a_tokenizer_says_so(gpt_checkpoint, tmp_path, capsys):
    bare = tmp_path / "bare"
    run(capsys, "--load", gpt_checkpoint, "--save", bare)
    for name in ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    for number, to in enumerate(("megatron01", "huggingface")):
        status, _, errors = run(capsys, "--load", bare, "--save", tmp_path / str(number), "--to", to)
        assert (
            status == 0
            and f"WARNING: {bare} holds no tokenizer, so there is none in {tmp_path / str(number)}" in errors
        )


def test_a_symbolic_link_is_followed(gpt_checkpoint, tmp_path, capsys):
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "link").symlink_to("large_disk")
    assert run(capsys, "--load", gpt_checkpoint, "--save", tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert read_model(str(tmp_path / "link")).architecture == "GPT-2"


def test_weights_that_are_not_finite_are_named_on_the_way_out(gpt_checkpoint, tmp_path, capsys):
    model = read_checkpoint(str(gpt_checkpoint))
    model.weights["transformer.final_norm.bias"][0] = torch.nan
    (tmp_path / "own").mkdir()
    write_checkpoint(model, tmp_path / "own", final=tmp_path / "own")
    status, _, errors = run(capsys, "--load", tmp_path / "own", "--save", tmp_path / "hf")
    assert status == 0 and "WARNING: 1 tensors, such as transformer.ln_f.bias" in errors
    status, _, errors = run(capsys, "--load", tmp_path / "own", "--save", tmp_path / "again", "--to", "megatron01")
    assert status == 0 and "WARNING: 1 tensors, such as transformer.final_norm.bias" in errors
    status, _, errors = run(capsys, "--load", tmp_path / "hf", "--save", tmp_path / "back")
    assert status == 2 and "NaN or infinite" in errors and not Path(tmp_path / "back").exists()
