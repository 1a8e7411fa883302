"""``megatron01 doctor``: checks of a job's machines, and measurement of their network.

diagnosis  local state of a process and its machine, and checks of all machines
network    measured bandwidth and latency of collectives and links
"""
