"""Pretrain BERT: ``torchrun --nproc-per-node 2 pretrain_bert.py --config configs/bert/debug.yaml``."""

import sys

from megatron01.parallel.program import run_as_program
from megatron01.pretraining import BERT

if __name__ == "__main__":
    run_as_program(lambda: BERT.run(sys.argv[1:], "pretrain_bert.py"))
