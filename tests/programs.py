"""Programs of this tree, run as users run them: in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *("--local-addr", "127.0.0.1", "--nproc-per-node"),  # the machine's own name may resolve to nothing
)


def run(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_python(*words: str | Path, cwd: Path | None = None) -> str:
    """What Python prints with these arguments, with status 0."""
    return run(sys.executable, *words, cwd=cwd).stdout
