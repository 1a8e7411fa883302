"""Helpers that know nothing of training: files, signals, shutdown, text, compiled kernels."""
