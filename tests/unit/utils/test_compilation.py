"""Cached machine code of kernels is never older than any file that it was compiled from."""

from __future__ import annotations

import ast
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron01
from megatron01.utils import compilation

PACKAGE = Path(megatron01.__file__).parent

ADDED = """

from megatron01.utils.compilation import compiled
{imports}


@compiled(nogil=True)
def added_here(x):
    return {body}
"""


def kernel_files(package: Path) -> list[Path]:
    return [path for path in sorted(package.rglob("*.py")) if "@compiled(" in path.read_text(encoding="utf-8")]


def module_name(path: Path, package: Path) -> str:
    return ".".join(path.relative_to(package.parent).with_suffix("").parts)


def evaluate(statement: str, folder: Path, **environment: str) -> list[str]:
    """Standard output of a statement in a Python process that imports ``megatron01`` from a folder."""
    found = subprocess.run(
        [sys.executable, "-B", "-c", statement],
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


def copy_of_package(folder: Path) -> Path:
    return Path(shutil.copytree(PACKAGE, folder / "megatron01", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.slow
def test_changed_callee_in_another_file_is_seen(tmp_path: Path) -> None:
    """A chain of kernels through all files with kernels gives the new result after its last callee has changed."""
    package = copy_of_package(tmp_path)
    files = kernel_files(package)
    assert len(files) >= 3
    originals = [path.read_text(encoding="utf-8") for path in files]
    for path, callee, original in zip(files[1:], files, originals[1:], strict=False):
        imports = f"from {module_name(callee, package)} import added_here as callee"
        path.write_text(original + ADDED.format(imports=imports, body="2 * callee(x)"), encoding="utf-8")
    call = (
        f"from {module_name(files[-1], package)} import added_here as f; print(f(1), sum(f.stats.cache_hits.values()))"
    )
    for value in (5, 7):
        files[0].write_text(originals[0] + ADDED.format(imports="", body=f"x * {value}"), encoding="utf-8")
        want = str(value * 2 ** (len(files) - 1))
        assert evaluate(call, tmp_path) == [want, "0"]
        assert evaluate(call, tmp_path) == [want, "1"]  # unchanged files: a cache hit


def test_kernels_are_compiled_in_one_place() -> None:
    """All numba compilation goes through ``compiled``, in files that the hash of the sources covers."""
    for path in PACKAGE.rglob("*.py"):
        if path != Path(compilation.__file__):
            for word in ("njit", "import jit", "numba.jit", "vectorize(", "cfunc("):
                assert word not in path.read_text(encoding="utf-8"), f"{word} in {path}"
    assert set(kernel_files(PACKAGE)) <= set(compilation.FILES)


def names_of_kernels(tree: ast.Module) -> Iterator[str]:
    """The names used in the compiled functions of a file."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any("compiled" in ast.dump(item) for item in node.decorator_list):
            yield from (part.id for line in node.body for part in ast.walk(line) if isinstance(part, ast.Name))


def test_all_that_kernels_import_is_hashed() -> None:
    """A constant or function of another file, used in a kernel, comes from one of the hashed files."""
    for path in kernel_files(PACKAGE):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = set(names_of_kernels(tree))
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron01"):
                used = sorted(names & {alias.asname or alias.name for alias in node.names})
                source = PACKAGE.parent.joinpath(*node.module.split(".")).with_suffix(".py")
                assert not used or source in compilation.FILES, f"{path} uses {used} of {source}"


@pytest.mark.slow
def test_without_a_writable_folder_kernels_are_compiled_without_cache(tmp_path: Path) -> None:
    package = copy_of_package(tmp_path)
    file = kernel_files(package)[0]
    file.write_text(file.read_text(encoding="utf-8") + ADDED.format(imports="", body="x + 1"), encoding="utf-8")
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    nowhere = tmp_path / "nowhere"  # a file in place of the cache folder, as root ignores file modes
    nowhere.touch()
    blocked = file.parent / "__pycache__"
    blocked.touch()
    for folder in folders:
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    call = f"from {module_name(file, package)} import added_here as f; print(f(1), f._cache.cache_path)"
    try:
        found = evaluate(call, tmp_path, HOME=str(nowhere), XDG_CACHE_HOME=str(nowhere), NUMBA_CACHE_DIR=str(nowhere))
    finally:
        for folder in folders:
            folder.chmod(stat.S_IRWXU)
    assert found == ["2", "None"]
    assert blocked.is_file()
