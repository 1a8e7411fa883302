"""``pretrain_gpt.py`` with steps of a third of a second, so that there is time to interrupt it."""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt
from megatron01.parallel.program import run_as_program

forward_step = pretrain_gpt.forward_step


def slow_forward_step(*arguments: Any) -> Any:
    time.sleep(0.33)
    return forward_step(*arguments)


if __name__ == "__main__":
    pretrain_gpt.forward_step = slow_forward_step
    run_as_program(pretrain_gpt.main)
