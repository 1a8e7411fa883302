"""``python -m megatron01`` is the ``megatron01`` program."""

from megatron01.cli import main

main()
