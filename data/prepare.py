"""``megatron01 data sample`` with this folder's ``prepared/`` as its output: ``python data/prepare.py``."""

import sys
from pathlib import Path

from megatron01.cli import main

main(["data", "sample", "--output", str(Path(__file__).resolve().parent / "prepared"), *sys.argv[1:]])
