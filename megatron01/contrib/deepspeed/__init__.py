"""Configurations of DeepSpeed, translated into this project's settings (``--deepspeed-config``)."""

from megatron01.contrib.deepspeed.source import DeepSpeedSource
from megatron01.contrib.deepspeed.translate import Row, Translation, translate

__all__ = ["DeepSpeedSource", "Row", "Translation", "translate"]
