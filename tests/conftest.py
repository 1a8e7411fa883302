"""Settings that must be made before any test module is imported, and the summary at the end of a test run."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import tests.triton_setup  # noqa: F401  (sets a variable that Triton reads when it is imported)

# Programs that tests start import the package of this tree, wherever another one is installed.
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
# Tests run in parallel: threads that wait for one another would keep cores from other tests.
os.environ["OMP_NUM_THREADS"] = "1"

# A kernel's first call loads or compiles it, and fixture folders may be written to repeatedly: no deadline, no check.
_ALWAYS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.register_profile("ci", _ALWAYS, max_examples=100, print_blob=True)
settings.register_profile("dev", _ALWAYS, max_examples=20)
settings.load_profile("dev")  # --hypothesis-profile=ci wins


def pytest_runtest_setup() -> None:
    torch.set_num_threads(1)  # a replica that an earlier test ran in this process took a thread for each core


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vocabularies and token files for GPT-2 and BERT, in a folder of the test module's own."""
    from tests.integration.tiny import make_corpus

    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder)
    return folder


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of benchmarks/ by its own name, as the programs there import each other."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    return importlib.import_module


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists the skipped tests and the reasons, so that a missing dependency is noticed."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    terminalreporter.section("skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
    if markers := terminalreporter.config.option.markexpr:
        terminalreporter.write_line(f"left out: all but -m {markers!r}; `make test-all` runs everything")
    elif not reasons:
        terminalreporter.write_line("nothing")
