"""Packages import only lower layers, and only the registry depends on the name of an optimizer."""

from __future__ import annotations

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

from megatron01.config.registry import OPTIMIZERS

PACKAGE = Path(__file__).parents[2] / "megatron01"
LAYERS = (
    *("errors", "utils", "config", "parallel", "contrib", "comm", "optim", "models", "data", "checkpoint", "monitor"),
    *("integrations", "cost", "convert", "training", "evaluate", "finetune", "plan", "compare", "doctor"),
    *("pretraining", "cli", "__main__"),
)


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a module, imports for type checking included."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        return [node.module]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_imports_point_down() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own == "__init__":  # the public names, imported on first use
            continue
        for node in nodes(path):
            for name in imported(node):
                parts = name.split(".")
                if parts[0] != "megatron01" or len(parts) == 1:
                    continue
                place = str(path.relative_to(PACKAGE))
                if LAYERS.index(parts[1]) > LAYERS.index(own):
                    wrong.append(f"{place} imports {name}")
    assert wrong == []


def test_imports_have_no_cycles() -> None:
    modules = {
        ".".join(("megatron01", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    uses: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in modules.items():
        for node in nodes(path):
            for name in imported(node):
                names = [f"{name}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
                found = [one for one in names if one in modules] or [name] * (name in modules)
                uses[module].update(one for one in found if path.name != "__init__.py")
    # but for a type: functions of an optimizer's spec take the settings, which are checked by the spec
    uses["megatron01.config.registry"].remove("megatron01.config.optimizer")
    assert list(TopologicalSorter(uses).static_order())  # or it raises CycleError, which names a cycle


def test_no_comparison_with_the_name_of_an_optimizer() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} line {node.lineno}: {ast.unparse(node)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, ast.Compare)
        and any(isinstance(inner, ast.Constant) and inner.value in OPTIMIZERS for inner in ast.walk(node))
    ]
    assert wrong == []
