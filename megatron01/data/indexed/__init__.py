"""Token files in Megatron's format: reading, writing, merging, checking."""
