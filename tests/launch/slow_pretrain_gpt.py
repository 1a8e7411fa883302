"""``pretrain_gpt.py`` with steps of a third of a second, so that there is time to interrupt it."""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron01.parallel.program import run_as_program
from megatron01.pretraining import GPT


class SlowGPT(GPT):
    @staticmethod
    def forward_step(*arguments: Any) -> Any:
        time.sleep(0.33)
        return GPT.forward_step(*arguments)


if __name__ == "__main__":
    run_as_program(lambda: SlowGPT.run(sys.argv[1:], "pretrain_gpt.py"))
