"""The settings of a pretraining run: nested, frozen dataclasses, one per part of the framework.

A field's docstring is its ``--help`` text, its name (with dashes) its flag, and its section and name its place in a
YAML file. Every value is checked before anything is built: alone in its group, with those of other groups in
``PretrainConfig``. What needs the world size or the tokenizer is checked where those are known
(``TrainingConfig.accumulation_steps``, ``models.base``).
"""

from megatron01.config.data import BertDataConfig, DataConfig, GPTDataConfig, TokenizerType
from megatron01.config.optimizer import FusedKernels, OptimizerConfig
from megatron01.config.pretrain import (
    BertModelConfig,
    BertPretrainConfig,
    CheckpointConfig,
    DistributedConfig,
    GPTModelConfig,
    GPTPretrainConfig,
    HealthConfig,
    LoggingConfig,
    ModelConfig,
    Precision,
    PretrainConfig,
    Recomputation,
    TrainingConfig,
)
