"""Pretrain GPT-2: ``torchrun --nproc-per-node 2 pretrain_gpt.py --config configs/gpt2/debug.yaml``."""

import sys

from megatron01.parallel.program import run_as_program
from megatron01.pretraining import GPT

if __name__ == "__main__":
    run_as_program(lambda: GPT.run(sys.argv[1:], "pretrain_gpt.py"))
