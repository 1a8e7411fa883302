"""``megatron01 doctor``: whether the machines of a job are ready for it, and how fast they talk."""
