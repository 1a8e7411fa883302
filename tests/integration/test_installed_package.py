"""The wheel, installed into an environment of its own, does everything outside of any source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.{}(sys.argv[1])"
SHORT = "--train-iters 3 --lr-warmup-iters 1 --eval-interval 3 --eval-iters 1 --log-interval 1 --micro-batch-size 2"


def build(kind: str, source: Path, output: Path) -> Path:
    """The distribution (``wheel`` or ``sdist``) of a source tree."""
    command = [sys.executable, "-c", BUILD.format(f"build_{kind}"), str(output)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = output.iterdir()
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, as setuptools writes into the one that it builds from."""
    folder = tmp_path_factory.mktemp("source") / "megatron01"
    names = (
        "__pycache__",
        "*_cache",
        ".venv",
        ".git",
        "build",
        "*.egg-info",
        "prepared",
        "cache",
        "runs",
        "checkpoints",
    )
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*names))
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel. What it depends on is this interpreter's, by a .pth file."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    command = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*command, str(wheel)], env=outside(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    torchrun = folder / "bin" / "torchrun"  # torch's own is beside this interpreter
    torchrun.write_text(f'#!/bin/sh\nexec {folder}/bin/python -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    return folder / "bin"


@pytest.fixture(scope="module")
def folder(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, with the token files of the shipped corpus."""
    path = tmp_path_factory.mktemp("user")
    run(installed, "data sample", path)
    return path


def outside() -> dict[str, str]:
    """The environment without the tree that is tested, whose package pip and Python would find."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def run(
    programs: Path, command: str, folder: Path, *, environ: Mapping[str, str] | None = None, user: Sequence[str] = ()
) -> str:
    """What ``megatron01 COMMAND`` prints."""
    done = attempt(programs, command, folder, environ=environ, user=user)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def attempt(
    programs: Path, command: str, folder: Path, *, environ: Mapping[str, str] | None = None, user: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    if environ is None:
        environ = outside() | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    words = [*user, str(programs / "python"), "-m", "megatron01", *command.split()]
    return subprocess.run(
        words, cwd=folder, env={**environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip


def test_the_wheel_holds_what_a_user_without_a_clone_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name.removeprefix("megatron01/shipped/") for name in archive.namelist()}
    for top in ("configs", "launch", "data/vocab"):
        ours = {str(path.relative_to(ROOT)) for path in (ROOT / top).rglob("*") if path.is_file()}
        assert ours and ours <= names, ours - names
    assert {"data/corpus.jsonl.xz", "data/README.md"} <= names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)


def test_the_sdist_holds_tests_docs_configurations_and_data(source: Path, tmp_path: Path) -> None:
    sdist = build("sdist", source, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not yet in Python 3.11.2
        archive.extractall(tmp_path / "unpacked", **safe)
    for top in ("configs", "data", "docs", "examples", "launch", "megatron01", "tests"):
        kept = (path for path in (source / top).rglob("*") if path.is_file() and path.name != ".gitignore")
        ours = {str(path.relative_to(source)) for path in kept}
        assert ours and ours <= names, ours - names
    for name in ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "NOTICE", "pretrain_gpt.py"):
        assert name in names
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", unpacked, tmp_path / "wheel")
    with zipfile.ZipFile(again) as archive:
        assert "megatron01/shipped/configs/gpt2/117m.yaml" in archive.namelist()


def test_commands_without_a_clone(installed: Path, folder: Path) -> None:
    assert run(installed, "--version", folder).startswith("megatron01 ")
    assert "gpt2/117m " in run(installed, "configs", folder)
    printed = run(installed, "configs gpt2/117m", folder)
    assert printed == (ROOT / "configs" / "gpt2" / "117m.yaml").read_text()
    for name in ("gpt2/117m", "gpt2/117m.yaml", "configs/gpt2/117m.yaml"):
        assert "num_layers: 12" in run(installed, f"pretrain gpt --config {name} --print-config", folder)
    assert "124M parameters" in run(installed, "schedule --config gpt2/117m", folder)
    assert "usual vocabulary" not in run(installed, "plan --config bert/base", folder)
    torchrun = run(installed, "launch torchrun --dry-run pretrain gpt --config gpt2/debug", folder)
    assert "-m megatron01 pretrain gpt --config gpt2/debug --load auto" in torchrun
    assert f"{installed}/python -m megatron01 pretrain bert" in run(
        installed, "launch mpirun --dry-run pretrain bert --config bert/debug", folder
    )


def test_a_configuration_of_the_users_own_comes_first(installed: Path, tmp_path: Path) -> None:
    own = tmp_path / "gpt2" / "117m"
    own.parent.mkdir()
    own.write_text("model:\n  num_layers: 3\n")
    assert "num_layers: 3\n" in run(installed, "pretrain gpt --config gpt2/117m --print-config", tmp_path)


def test_pretraining_on_two_processes_and_what_follows(installed: Path, folder: Path) -> None:
    launched = run(
        installed, f"launch torchrun pretrain gpt --config gpt2/debug --save checkpoints/gpt {SHORT}", folder,
        environ={"PATH": f"/usr/bin:{os.defpath}", "REPLICAS": "2", "DOCTOR": "no", "HOME": str(folder)},
    )  # fmt: skip
    assert "test loss" in launched and "Adam would send" in launched
    assert run(installed, "generate --load checkpoints/gpt --prompt The --max-new-tokens 3", folder).startswith("The")
    assert "test loss" in run(installed, f"pretrain bert --config bert/debug --save checkpoints/bert {SHORT}", folder)


def has_privileges_to_drop() -> bool:
    return os.geteuid() == 0 and shutil.which("setpriv") is not None


@pytest.mark.parametrize("home", [None, "/nonexistent"])
def test_without_compiler_home_and_a_place_for_machine_code(home: str | None, installed: Path, folder: Path) -> None:
    """As in a container whose user is only a number: the package is read-only, and there is no home."""
    place = folder / f"home_is_{(home or 'unset').strip('/')}"
    place.mkdir()
    (place / "data").symlink_to(folder / "data")
    user: list[str] = []
    if has_privileges_to_drop():  # else the package's folder may well be writable, and the cache there is used
        os.chown(place, 12345, 12345)
        user = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups"]
        user += ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    environ = {"PATH": str(installed), "TMPDIR": str(place)} | ({} if home is None else {"HOME": home})
    setpriv = shutil.which("setpriv")
    words = [str(setpriv), *user[1:]] if user else []
    command = f"pretrain gpt --config gpt2/debug --data-cache-path cache {SHORT}"
    assert "test loss" in run(installed, command, place, environ=environ, user=words)
    assert not (place / "~").exists()
    done = attempt(installed, f"{command} --torch-compile", place, environ=environ, user=words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "torch_compile needs a compiler of C++, and there is no g++ on" in done.stderr
