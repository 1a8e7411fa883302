"""``pretrain_gpt.py`` with steps of a third of a second, so that there is time to interrupt it."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron01.parallel.program import run_as_program
from megatron01.pretraining import GPT


def slow_forward_step(*arguments: Any) -> Any:
    time.sleep(0.33)
    return GPT.forward_step(*arguments)


if __name__ == "__main__":
    slow = replace(GPT, forward_step=slow_forward_step)
    run_as_program(lambda: slow.run(sys.argv[1:], "pretrain_gpt.py"))
