"""``megatron01 doctor``: whether the machines of a job are ready for it, and how fast they talk.

diagnosis  what a process sees of its machine, and what is wrong with the machines together
network    rates and latencies between them, measured
"""
