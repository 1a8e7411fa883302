"""pretrain_gpt.py, of which rank 1 is killed in the eleventh step of its first attempt; started by torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron01.parallel.program import run_as_program
from megatron01.pretraining import GPT
from tests.faults.injection import Injection, Kill

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    Injection(Kill(), "a step", 10).arm(Path(os.environ["FIRED"]))
run_as_program(lambda: GPT.run(sys.argv[1:], "pretrain_gpt.py"))
