"""What a run reports: metrics per logging interval, the files of its folder, and the closing account of its traffic."""

from megatron01.monitor.hardware import peak_flops
from megatron01.monitor.metrics import Meter, Metrics, StepReport, Totals, describe_traffic
from megatron01.monitor.run_directory import RunDirectory
from megatron01.monitor.writers import Recorder, open_recorder

__all__ = [
    "Meter",
    "Metrics",
    "Recorder",
    "RunDirectory",
    "StepReport",
    "Totals",
    "describe_traffic",
    "open_recorder",
    "peak_flops",
]
