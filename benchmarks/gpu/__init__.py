"""Correctness checks and benchmarks for a machine with one GPU, by one command: ``python -m benchmarks.gpu``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the other benchmarks import each other from their own folder
