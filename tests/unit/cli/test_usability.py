"""Names, hints, help, completion and colours of the command line; files that come with the package."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from megatron01 import cli
from megatron01.config.command_line import parse
from megatron01.config.commands import ConvertConfig, GenerateConfig, GlueConfig, PerplexityConfig, PreprocessConfig
from megatron01.config.fields import Settings
from megatron01.config.yaml_files import find_config, load_yaml, shipped_configs
from megatron01.convert.formats import checkpoints_of_run
from megatron01.doctor.command import _folder_problems as folder_problems
from megatron01.errors import UserError
from megatron01.plan.settings import GPTForecastConfig
from megatron01.pretraining import BERT, GPT
from megatron01.utils.files import SHIPPED, shipped
from megatron01.utils.formatting import painter

ROOT = Path(__file__).resolve().parents[3]


def run(*argv: str) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    return caught.value.code


def of(config_class: type, *arguments: str):
    return parse(config_class, arguments, prog="test", description="Test.")


def test_version_and_help_in_all_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for words in (["version"], ["--version"], ["-V"], ["help"], ["--help"], ["help", "plan"], ["plan", "--help"]):
        assert not run(*words)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2] and printed[0].startswith("megatron01 ")
    assert printed[3] == printed[4] and "  plan " in printed[3] and "  complete " not in printed[3]
    assert printed[5] == printed[6] and printed[5].startswith("usage: megatron01 plan")


HELP = """
import contextlib, io, sys
from megatron01.cli import COMMANDS, main
for name in [*COMMANDS, "data merge", "checkpoint list", "pretrain gpt", "pretrain bert"]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main([*name.split(), "--help"])
    heavy = {"torch", "numba", "matplotlib", "wandb", "transformers", "datasets", "pyarrow"} & set(sys.modules)
    assert not heavy, (name, heavy)
    assert name in ("complete", "version") or output.getvalue().startswith("usage: "), name
"""


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("config_class", "flag", "hint"),
    [
        (GPTForecastConfig, "--processes", "here it is --nodes or --processes-per-node"),
        (GPT.config_class, "--model", "here it is --load or --pretrained-checkpoint"),
        (GPT.config_class, "--input", "here it is --data-path or --train-data-path"),
        (GPT.config_class, "--output", "here it is --save"),
        (GPT.config_class, "--batch-size", "here it is --micro-batch-size"),
        (GPT.config_class, "--Max_Steps", "here it is --train-iters"),
        (GPT.config_class, "--learning-rate", "here it is --lr"),
        (GPT.config_class, "--bf16", "here it is --precision bf16"),
        (GPT.config_class, "--finetune", "here it is --pretrained-checkpoint"),
        (GPT.config_class, "--no-load-optim", "here it is --pretrained-checkpoint"),
        (GPT.config_class, "--train-samples", "here it is --train-iters"),
        (GPT.config_class, "--save-retain-interval", "here it is --keep-every"),
        (GPT.config_class, "--recompute-granularity", "here it is --recompute-activations"),
        (GPT.config_class, "--use-distributed-optimizer", "here it is --shard-optimizer"),
        (GPT.config_class, "--var_freeze_step", "here it is --variance-freeze-step"),
        (BERT.config_class, "--bert-no-binary-head", "here it is --objective"),
        (GPT.config_class, "--gradient-checkpointing", "here it is --recompute-activations"),
        (GPT.config_class, "--hiden-size", "did you mean '--hidden-size'?"),
        (GPT.config_class, "--encoder-seq-length", "here it is --seq-length"),
        (GPT.config_class, "--no-bias-gelu-fusion", "leave it out, there is no such setting here"),
        (GPT.config_class, "--swiglu", "leave it out, models here are GPT-2 and BERT as published"),
        (
            GPT.config_class,
            "--context-parallel-size",
            "leave it out, a model is divided by --tensor-model-parallel-size alone",
        ),
        (GPT.config_class, "--profile", "see test --help"),  # nothing is close
        (GenerateConfig, "--checkpoint", "here it is --load"),
        (GenerateConfig, "--file", "here it is --input or --text"),
        (GenerateConfig, "--max-length", "here it is --max-new-tokens"),
        (PerplexityConfig, "--data-path", "here it is --input"),
        (PreprocessConfig, "--data", "here it is --input"),
        (PreprocessConfig, "--save", "here it is --output-prefix"),
        (PreprocessConfig, "--tokenizer", "here it is --tokenizer-type or --tokenizer-model"),
        (ConvertConfig, "--out", "here it is --output"),
        (ConvertConfig, "--vocab-size", "did you mean '--vocab-file'?"),  # which training leaves out
        (GlueConfig, "--lr", "here it is --learning-rates"),
        (GlueConfig, "--task", "here it is --tasks"),
    ],
)
def test_the_name_that_others_have_for_a_flag_hints_at_ours(config_class: type, flag: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        of(config_class, flag, "x")
    assert str(caught.value) == f"unknown flag {flag}; {hint}"


def test_all_unknown_flags_of_a_script_are_named_at_once() -> None:
    script = "--num-layers 24 --attention-backend auto --lr 1e-4 --fp16 --rampup-batch-size 16 -1 -.5 --quux=1 --quux 2"
    with pytest.raises(UserError) as caught:
        of(GPT.config_class, *script.split())
    assert str(caught.value) == (
        "unknown flags --attention-backend (leave it out, there is no such setting here), --fp16 (here it is"
        " --precision fp16), --rampup-batch-size (did you mean '--micro-batch-size'?), --quux"
    )


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--save", "", "save is empty; expected a folder, or none"),  # --save "$FOLDER" without such a variable
        ("--load", "", "load is empty; expected a folder, or none"),
        ("--pretrained-checkpoint", "", "pretrained_checkpoint is empty; expected a folder, or none"),
        ("--optimizer", "./own.py", "optimizer is './own.py'; expected package.module.Class"),
        ("--optimizer", ".Own", "optimizer is '.Own'; expected package.module.Class"),
        ("--split", "inf,1", "split is 'inf,1'; expected up to three finite numbers"),
        ("--distributed-timeout-minutes", "1e9", "expected a positive number, at most 525600 (a year)"),
        ("--lr", "1e99", "lr is 1e+99; expected 0 to 3e38, the range of fp32"),
        ("--train-iters", "1e17", "train_iters is 100000000000000000; expected a positive number, at most 100000000"),
        ("--num-layers", "1e18", "num_layers is 1000000000000000000; expected a positive number, at most 10000"),
        ("--hidden-size", "1e18", "hidden_size is 1000000000000000000; expected a positive number, at most 100000000"),
        ("--ffn-hidden-size", "1e18", "expected a positive number, at most 100000000"),
        ("--max-position-embeddings", "1e18", "expected a positive number, at most 100000000"),
        ("--make-vocab-size-divisible-by", "1e18", "expected a positive number, at most 100000000"),
        ("--block-size", "0", "block_size is 0; expected a power of two from 32 to 2**30"),
        ("--block-size", "-1024", "block_size is -1024; expected a power of two from 32 to 2**30"),
        ("--block-size", "1000", "block_size is 1000; expected a power of two from 32 to 2**30"),
        ("--block-size", "1e18", "expected a power of two from 32 to 2**30"),
        ("--wandb-name", "a", "wandb_name is given, but not wandb_project; give --wandb-project as well"),
        ("--lr-warmup-init", "1e-5", "lr_warmup_init is 1e-05, but there is no warm-up; give --lr-warmup-iters or"),
    ],
)
def test_values_that_no_run_can_use(flag: str, value: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        of(GPT.config_class, flag, value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [  # an empty word is "$FOLDER" without such a variable; as a path it would be the current folder
        (["compare", "run", "--output", ""], "--output is ''; expected a path"),
        (["convert", "--load", "", "--output", "x"], "load is empty; expected a folder"),
        (["data", "merge", "a", "--output", ""], "output_prefix is ''; expected a folder and the start of a file name"),
        (["data", "merge", "a", "--output", "x/"], "output_prefix is 'x/'; expected a folder and the start of a file"),
        (["data", "merge", "", "--output", "x"], "input holds an empty path"),
        (["data", "verify", "a", ""], "input holds an empty path"),
        (["data", "sample", "--output", ""], "output is empty; expected a folder"),
        (["watch", ""], "the folder of the run is empty text"),
        (["checkpoint", "list", ""], "takes one folder, but was given none"),
        (["compare", "run", "--wandb-mode", "online"], "wandb_mode is given, but not --wandb"),
        (
            ["doctor", "--timeout-seconds", "1e308"],
            "timeout_seconds is 1e+308; expected a positive number, at most 86400",
        ),
    ],
)
def test_values_that_no_command_can_use(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out
    assert not list(tmp_path.iterdir())


def test_a_configuration_without_its_flag_is_recognized() -> None:
    with pytest.raises(
        UserError, match="unexpected argument 'gpt2/117m'; a configuration is given as --config gpt2/117m"
    ):
        of(GPT.config_class, "gpt2/117m")


def test_a_file_of_text_without_its_flag_is_no_configuration() -> None:
    with pytest.raises(UserError, match=r"unexpected argument .*; settings are given as flags, see"):
        of(PreprocessConfig, __file__)


def test_a_flag_without_value_that_is_given_one() -> None:
    with pytest.raises(UserError, match="'false'; a setting is turned on as --NAME and off as --no-NAME"):
        of(GPT.config_class, "--tf32", "false")


def test_former_names_are_understood_and_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert of(ConvertConfig, "--load", "a", "--save", "b").output == "b"
    assert of(GenerateConfig, "--load", "a", "--prompt", "x", "y").text == ("x", "y")
    assert of(GenerateConfig, "--load", "a", "--prompt-file", "x").input == Path("x")
    assert of(PerplexityConfig, "--load", "a", "--data", "x").input == "x"
    assert of(GlueConfig, "--load", "a", "--data", "x", "--output", "o").input == "x"
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "v", "--merge-file", "m"]
    assert of(PreprocessConfig, *tokenizer, "--input", "x", "--output", "y").output_prefix == "y"
    (tmp_path / "old.yaml").write_text("load: a\nsave: b\n")
    assert load_yaml(tmp_path / "old.yaml", Settings(ConvertConfig)) == {"load": "a", "output": "b"}
    with pytest.raises(SystemExit):
        of(ConvertConfig, "--help")
    shown = capsys.readouterr().out
    assert "--output" in shown and "--save" not in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], ["pretrain", "generate", "help", "--version"]),
        (["data", ""], ["inspect", "merge", "sample", "verify"]),
        (["generate", "--te"], ["--temperature", "--text"]),
        (["data", "merge", "--"], ["--input", "--output-prefix"]),
        (["pretrain", "gpt", "--print"], ["--print-config", "--lr", "--no-torch-compile"]),
        (["pretrain", "gpt", "--precision", ""], ["fp32", "bf16", "fp16"]),
        (["pretrain", "bert", "--config", ""], ["bert/base", "gpt2/117m"]),
        (["help", ""], ["pretrain"]),
        (["nothing", ""], []),
    ],
)
def test_completion(words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("complete", *words)
    found = capsys.readouterr().out.split()
    assert set(expected) <= set(found) and (expected or not found)


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("completion", shell)
    script = capsys.readouterr().out
    assert "megatron01 complete " in script
    if shell == "bash":
        call = "COMP_WORDS=(megatron01 generate --tem); COMP_CWORD=2; _megatron01; echo ${COMPREPLY[@]}"
        program = f'megatron01() {{ {sys.executable} -m megatron01 "$@"; }}\n{script}\n{call}'
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.stdout == "--temperature\n", done.stderr
    assert run("completion", "tcsh") == 2
    assert "takes one of bash, fish, zsh" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "coloured"),
    [
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
        (None, {"TERM": "xterm"}, False),
    ],
)
def test_colours_where_a_terminal_has_them(stream, environ, coloured, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert painter(stream)("text", "red") == ("\033[31mtext\033[0m" if coloured else "text")


def test_shipped_files_are_those_of_the_repository() -> None:
    for name in ("configs", "launch", "data/vocab", "data/corpus.jsonl.xz", "data/README.md"):
        assert (SHIPPED / name).resolve() == ROOT / name
    assert shipped_configs() == sorted(
        str(path.relative_to(ROOT / "configs").with_suffix("")) for path in (ROOT / "configs").rglob("*.yaml")
    )


def test_shipped_files_are_found_by_name_unless_there_are_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2/1.5b", "gpt2/1.5b.yaml", "configs/gpt2/1.5b.yaml"):
        assert find_config(name) == SHIPPED / "configs" / "gpt2" / "1.5b.yaml"
    assert shipped("data/vocab/gpt2-vocab.json") == SHIPPED / "data" / "vocab" / "gpt2-vocab.json"
    own = tmp_path / "configs" / "gpt2" / "1.5b.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("")
    assert find_config("configs/gpt2/1.5b.yaml") == Path("configs/gpt2/1.5b.yaml")
    with pytest.raises(UserError, match="config file gpt2/117 does not exist; did you mean 'gpt2/117m'"):
        load_yaml("gpt2/117", Settings(GPT.config_class))
    with pytest.raises(UserError, match=r"gpt2 does not exist; there are gpt2/1\.5b, gpt2/117m, .*, gpt2/debug$"):
        load_yaml("gpt2", Settings(GPT.config_class))
    assert BERT.config_class is not GPT.config_class


def test_configs_and_launchers_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("configs", "configs/bert/base.yaml")
    assert capsys.readouterr().out == (ROOT / "configs" / "bert" / "base.yaml").read_text()
    assert run("configs", "bert/bases") == 2
    assert run("configs", "nothing-alike") == 2
    assert run("launch", "torchrum") == 2
    errors = capsys.readouterr().err
    assert "configuration bert/bases does not exist; did you mean 'bert/base'?" in errors
    assert "configuration nothing-alike does not exist; megatron01 configs lists those that are shipped" in errors
    assert "there is no launcher 'torchrum'; did you mean 'torchrun'?" in errors
    assert not run("launch")
    assert "torchrun.sh" in capsys.readouterr().out


def make_checkpoint(folder: Path) -> None:
    (folder / "iter_0000001").mkdir(parents=True)
    (folder / "iter_0000001" / "config.yaml").write_text("")


def test_the_checkpoints_of_a_run_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, work = tmp_path / "runs" / "a", tmp_path / "work"
    run_dir.mkdir(parents=True)
    assert checkpoints_of_run(run_dir) is None
    (run_dir / "environment.json").write_text(f'{{"working_folder": "{work}"}}')
    (run_dir / "config.yaml").write_text("checkpoint:\n  save: checkpoints/a\nlogging:\n  run_dir: runs/a\n")
    other = tmp_path / "other"  # where another run has checkpoints of that name
    make_checkpoint(other / "checkpoints" / "a")
    monkeypatch.chdir(other)
    with pytest.raises(UserError, match="is the folder of a run whose checkpoints checkpoints/a do not exist"):
        checkpoints_of_run(run_dir)
    # the last one wins; that is where they are after all of the run's files have been moved or copied
    for place in (run_dir / "a", work / "checkpoints" / "a", tmp_path / "checkpoints" / "a"):
        make_checkpoint(place)
        assert checkpoints_of_run(run_dir) == place
    monkeypatch.chdir(tmp_path)
    assert checkpoints_of_run(Path("runs/a")) == Path("checkpoints/a")
    (run_dir / "config.yaml").write_text("checkpoint:\n  save: null\n")
    with pytest.raises(UserError, match="is the folder of a run that saved no checkpoints"):
        checkpoints_of_run(run_dir)


def test_the_doctor_of_one_machine_notices_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert folder_problems(tmp_path) == []
    (problem,) = folder_problems(tmp_path / "none")
    assert problem.startswith(f"--shared-folder {tmp_path / 'none'} is not there; make it (mkdir -p ")
    (tmp_path / "file").touch()
    assert folder_problems(tmp_path / "file") == [
        f"--shared-folder {tmp_path / 'file'} is a file; give the folder that the run has"
    ]


def test_a_quick_sweep_takes_the_place_of_defaults_alone(tmp_path: Path) -> None:
    needed = ["--load", "m", "--input", "d", "--output", "o"]
    config = of(GlueConfig, *needed, "--quick")
    assert (config.batch_sizes, config.learning_rates, config.seeds, config.epochs) == ((16,), (5e-5,), 1, 1.0)
    config = of(GlueConfig, *needed, "--quick", "--seeds", "2", "--epochs", "3")  # the last is the default
    assert (config.batch_sizes, config.seeds, config.epochs) == ((16,), 2, 3.0)
    assert of(GlueConfig, *needed, "--quick", "--no-quick").seeds == 10
    file = tmp_path / "sweep.yaml"
    file.write_text("quick: true\nseeds: 10\n")
    config = of(GlueConfig, *needed, "--config", str(file))
    assert (config.seeds, config.epochs) == (10, 1.0)
