"""``megatron01 generate``, ``fill-mask`` and ``perplexity`` as a user runs them."""

from __future__ import annotations

import io
import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron01.cli import main
from megatron01.convert.formats import load_model
from megatron01.convert.huggingface import write_hf_folder
from megatron01.convert.native import read_checkpoint
from megatron01.evaluate import commands
from tests.integration.tiny import bert_config, gpt_config, make_corpus
from tests.unit.convert.trained import save_trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints and Hugging Face folders of a GPT-2 and a BERT."""
    folder = tmp_path_factory.mktemp("models")
    make_corpus(folder / "corpus")
    save_trained(gpt_config(folder / "corpus"), folder / "gpt")
    save_trained(bert_config(folder / "corpus"), folder / "bert")
    for name in ("gpt", "bert"):
        (folder / f"{name}_hf").mkdir()
        model = read_checkpoint(str(folder / name))
        write_hf_folder(model, folder / f"{name}_hf", dtype="fp32")
    return folder


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


class Typed(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_generate_equals_transformers(folder, capsys):
    arguments = ["--prompt", "the fox", "seven", "--greedy", "--max-new-tokens", 9, "--no-stop-at-eod"]
    status, output, _ = run(capsys, "generate", "--load", folder / "gpt", *arguments)
    assert status == 0
    assert run(capsys, "generate", "--load", folder / "gpt_hf", *arguments)[1] == output
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "gpt_hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "gpt_hf")
    model.generation_config.eos_token_id = None
    for number, prompt in enumerate(("the fox", "seven"), start=1):
        ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=9, do_sample=False)
        assert f"--- {number} of 2\n{tokenizer.decode(ids[0])}\n" in output


@pytest.mark.parametrize("stops", [True, False])
def test_whether_the_end_of_a_document_ends_a_text(folder, capsys, monkeypatch, stops):
    given = []
    monkeypatch.setattr(commands, "generate_tokens", lambda model, prompts, **settings: given.append(settings) or [[]])
    arguments = ["generate", "--load", folder / "gpt", "--prompt", "a", *([] if stops else ["--no-stop-at-eod"])]
    assert run(capsys, *arguments)[0] == 0
    eod = load_model(str(folder / "gpt")).tokenizer.eod
    assert given[0]["stop"] == (eod if stops else None) and eod is not None


def test_prompts_from_a_file(folder, tmp_path, capsys):
    lines, objects, results = tmp_path / "p.txt", tmp_path / "p.jsonl", tmp_path / "results.jsonl"
    lines.write_bytes(b"the fox\r\n\nseven boats\r\n")
    objects.write_text('{"text": "the fox"}\n{"text": ""}\n{"text": "seven boats"}\n')
    sampling = ["--seed", 3, "--top-k", 50, "--temperature", 0.7, "--max-new-tokens", 8]
    _, output, _ = run(capsys, "generate", "--load", folder / "gpt", "--prompt-file", lines, *sampling)
    for size in (1, 2):
        more = ["--output", results, "--batch-size", size]
        assert run(capsys, "generate", "--load", folder / "gpt", "--prompt-file", objects, *sampling, *more)[:2] == (
            0,
            "",
        )
        entries = [json.loads(line) for line in results.read_text().splitlines()]
        assert [entry["prompt"] for entry in entries] == ["the fox", "", "seven boats"]
        assert all(entry["prompt"] + entry["completion"] in output for entry in entries)


def test_samples_differ_and_come_again(folder, capsys):
    arguments = ["generate", "--load", folder / "gpt", "--prompt", "a", "--num-samples", 3, "--max-new-tokens", 12]
    first = run(capsys, *arguments)[1]
    assert len({part.split("\n", 1)[1] for part in first.split("---")[1:]}) == 3  # without the numbers in headings
    assert run(capsys, *arguments)[1] == first
    assert run(capsys, *arguments, "--seed", 5)[1] != first


def test_the_folder_of_the_output_is_made_before_the_work(folder, tmp_path, capsys):
    output = tmp_path / "new" / "a.jsonl"
    arguments = ["generate", "--load", folder / "gpt", "--text", "the fox", "--max-new-tokens", 2, "--output", output]
    assert run(capsys, *arguments)[0] == 0
    assert json.loads(output.read_text())["tokens"] == 2
    status, _, errors = run(capsys, "generate", "--load", "nothing", *arguments[3:-1], output / "b.jsonl")
    assert status == 2 and errors == f"error: the folder {output} of output cannot be written: File exists\n"
    status, _, errors = run(capsys, "generate", "--load", "nothing", *arguments[3:-1], tmp_path / "new")
    assert status == 2 and errors == f"error: output {tmp_path / 'new'} cannot be written: Is a directory\n"


def test_interactive(folder, capsys, monkeypatch):
    arguments = ["generate", "--load", folder / "gpt", "--interactive", "--greedy", "--max-new-tokens", 6]
    monkeypatch.setattr("sys.stdin", Typed(f"the fox\n{'a ' * 40}\nseven\n"))
    status, output, errors = run(capsys, *arguments)
    assert status == 0 and errors.count("> ") == 4
    assert "error: a text has 80 tokens and the model 32 positions" in errors
    expected = run(capsys, *arguments[:3], "--prompt", "the fox", "seven", *arguments[4:])[1]
    assert all(part.split("\n", 1)[1].strip() in output for part in expected.split("---")[1:])


def test_interactive_samples_are_those_of_a_batch(folder, capsys, monkeypatch):
    arguments = ["generate", "--load", folder / "gpt", "--seed", 3, "--num-samples", 2, "--max-new-tokens", 6]
    monkeypatch.setattr("sys.stdin", Typed("the fox\nseven\n"))
    samples = run(capsys, *arguments, "--interactive")[1]
    batch = run(capsys, *arguments, "--prompt", "the fox", "seven", "--batch-size", 1)[1]
    assert samples == "".join(part.split("\n", 1)[1] for part in batch.split("---")[1:])


def test_fill_mask_equals_transformers(folder, capsys, monkeypatch):
    text = "the quick [MASK] fox jumps"
    status, output, _ = run(capsys, "fill-mask", "--load", folder / "bert", "--text", text, "--json", "--top-k", 4)
    assert status == 0
    pipeline = transformers.pipeline("fill-mask", str(folder / "bert_hf"), top_k=4)
    expected = [(entry["token_str"], entry["score"]) for entry in pipeline(text)]
    (found,) = json.loads(output)["masks"]
    assert [entry["token"] for entry in found] == [token for token, _ in expected]
    assert [entry["probability"] for entry in found] == pytest.approx([score for _, score in expected], rel=1e-4)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{text}\n\na [MASK] and a [MASK]\n"))
    _, output, _ = run(capsys, "fill-mask", "--load", folder / "bert_hf", "--top-k", 2)
    lines = output.splitlines()
    assert lines[0] == text and lines[1].startswith(f"  {expected[0][0]} 0.")
    assert lines[2] == "a [MASK] and a [MASK]" and [line[:4] for line in lines[3:]] == ["  1:", "  2:"]
    monkeypatch.setattr("sys.stdin", Typed(f"no mask\n{text}\n"))
    status, output, errors = run(capsys, "fill-mask", "--load", folder / "bert_hf", "--top-k", 2)
    assert (status, output.splitlines()) == (0, lines[:2]) and errors.startswith("error: there is no [MASK]")


def test_perplexity(folder, tmp_path, capsys):
    (tmp_path / "held.txt").write_text("the quick brown fox jumps over a lazy dog while seven boats sail home")
    status, output, _ = run(capsys, "perplexity", "--load", folder / "gpt", "--data", tmp_path / "held.txt", "--json")
    found = json.loads(output)
    assert status == 0
    assert (found["window"], found["stride"], found["words"], found["bytes"], found["tokens"]) == (32, 16, 14, 69, 69)
    _, output, _ = run(capsys, "perplexity", "--load", folder / "gpt_hf", "--data", tmp_path / "held.txt")
    assert f"loss                  {found['loss']:.4f} nats per token (window 32, stride 16)" in output
    assert f"bits per byte         {found['bits_per_byte']:.4f}" in output
    (tmp_path / "held.txt").write_text("   ")
    _, output, _ = run(capsys, "perplexity", "--load", folder / "gpt", "--data", tmp_path / "held.txt", "--json")
    found = json.loads(output, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (found["words"], found["perplexity_per_word"]) == (0, None)
    arguments = ["perplexity", "--load", folder / "gpt", "--data", folder / "corpus" / "gpt", "--max-tokens", 90]
    assert "90 tokens" in run(capsys, *arguments)[1]
    assert "(window 1, stride 1)" in run(capsys, *arguments, "--window", 1)[1]


def test_perplexity_equals_transformers(folder, tmp_path, capsys):
    (tmp_path / "held.txt").write_text("the quick brown fox")
    arguments = ["perplexity", "--load", folder / "gpt", "--data", tmp_path / "held.txt", "--json"]
    loss = json.loads(run(capsys, *arguments)[1])["loss"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "gpt_hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "gpt_hf")
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer("the quick brown fox").input_ids]])
    with torch.no_grad():
        assert loss == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--load", "bert", "--prompt", "a"], "is a BERT; expected a GPT-2"),
        (["perplexity", "--load", "bert", "--data", "x"], "is a BERT; expected a GPT-2"),
        (["fill-mask", "--load", "gpt", "--text", "[MASK]"], "is a GPT-2; expected a BERT"),
        (["generate", "--load", "gpt"], "expected one of --text, --input and --interactive"),
        (["generate", "--load", "gpt", "--text", "a", "--greedy", "--top-k", "3"], "top_k is given with greedy"),
        (["generate", "--load", "gpt", "--text", "a", "--temperature", "0"], "or give --greedy"),
        (["generate", "--load", "gpt", "--text", "a" * 32], "32 tokens and the model 32 positions"),
        (["generate", "--load", "gpt", "--text", "a\udcff"], "not UTF-8"),
        (["generate", "--load", "gpt", "--input", "p.txt"], "input p.txt cannot be read"),
        (["generate", "--load", "gpt", "--input", "/dev/null"], "input /dev/null holds no text"),
        (["perplexity", "--load", "gpt", "--input", "gpt/none"], "cannot be read"),
        (["perplexity", "--load", "gpt", "--input", "x", "--window", "33"], "window is 33; the model has 32"),
        (["perplexity", "--load", "gpt", "--input", "x", "--stride", "33"], "stride 33 is above the window of 32"),
        (
            ["perplexity", "--load", "gpt", "--input", "x", "--stride", "3", "--window", "2"],
            "stride 3 is above window 2",
        ),
        (["fill-mask", "--load", "bert", "--text", "\udcff [MASK]"], "a text holds bytes that are not UTF-8"),
        (["fill-mask", "--load", "bert", "--text", "home"], "there is no [MASK] in 'home'"),
        (["generate", "--load", "corpus", "--prompt", "a"], "holds no model in a known format"),
    ],
)
def test_mistakes_are_one_line(folder, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    status, _, errors = run(capsys, *arguments)
    assert status == 2 and message in errors and errors.count("\n") == 1


def test_types_and_devices(folder):
    loaded = load_model(str(folder / "gpt"), dtype="bf16", device="cpu")
    assert str(loaded.model.embedding.word_embeddings.weight.dtype) == "torch.bfloat16"
    assert not loaded.model.training


@pytest.mark.parametrize(
    ("name", "large", "arguments"),
    [
        ("gpt", ["transformer.h.0.attn.c_proj.bias", "transformer.h.0.mlp.c_proj.bias"], ["generate", "--text", "a"]),
        ("gpt", ["transformer.h.0.attn.c_proj.bias", "transformer.h.0.mlp.c_proj.bias"], ["perplexity", "--input"]),
        (
            "bert",
            ["bert.encoder.layer.0.intermediate.dense.bias", "bert.encoder.layer.0.output.dense.bias"],
            ["fill-mask", "--text", "[MASK]"],
        ),
    ],
)
def test_numbers_that_fp16_does_not_hold(folder, tmp_path, capsys, name, large, arguments):
    """Infinite hidden states become NaN logits, of which every choice would still give some token."""
    (tmp_path / "held.txt").write_text("the fox")
    arguments = [*arguments, *([tmp_path / "held.txt"] if arguments[0] == "perplexity" else []), "--device", "cpu"]
    if arguments[0] == "generate":
        arguments.append("--greedy")
    shutil.copytree(folder / f"{name}_hf", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    for weight in large:
        weights[weight][:] = torch.linspace(-60000, 60000, len(weights[weight]))
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    assert run(capsys, *arguments, "--load", tmp_path / "model")[0] == 0
    status, _, errors = run(capsys, *arguments, "--load", tmp_path / "model", "--dtype", "fp16")
    assert status == 2
    assert errors == "error: the model computes NaN or infinite logits in float16; give --dtype fp32 or bf16\n"
    for weight in large:
        weights[weight][:] = 3e38
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    status, _, errors = run(capsys, *arguments, "--load", tmp_path / "model", "--dtype", "fp32")
    assert status == 2 and "logits in float32; use another model or checkpoint" in errors
