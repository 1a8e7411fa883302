"""Everything that a machine with one GPU can prove and measure, by one command: ``python -m benchmarks.gpu``."""
