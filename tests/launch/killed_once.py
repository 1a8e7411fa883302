"""pretrain_gpt.py, of which rank 1 is killed in the eleventh step of its first attempt; started by torchrun."""

from __future__ import annotations

import os
from pathlib import Path

import pretrain_gpt
from megatron01.parallel.program import run_as_program
from tests.faults.injection import Injection, Kill

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    Injection(Kill(), "a step", 10).arm(Path(os.environ["FIRED"]))
run_as_program(pretrain_gpt.main)
