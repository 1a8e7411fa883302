"""Correctness checks and benchmarks for a machine with one GPU, by one command: ``python -m benchmarks.gpu``."""
