"""The settings of a pretraining run: nested, frozen dataclasses, one per part of the framework.

A field's docstring is its ``--help`` text, its name (with dashes) its flag, and its section and name its place in a
YAML file. Every value is checked before anything is built: alone in its group's module, with those of other groups
in ``pretrain``. What needs the world size or the tokenizer is checked where those are known
(``TrainingConfig.accumulation_steps``, ``models.sizes``).
"""

from megatron01.config.data import BertDataConfig, DataConfig, GPTDataConfig, TokenizerType
from megatron01.config.distributed import DistributedConfig
from megatron01.config.model import BertModelConfig, FusedKernels, GPTModelConfig, ModelConfig, Recomputation
from megatron01.config.optimizer import LRDecayStyle, OptimizerConfig
from megatron01.config.pretrain import BertPretrainConfig, GPTPretrainConfig, PretrainConfig
from megatron01.config.training import CheckpointConfig, HealthConfig, LoggingConfig, Precision, TrainingConfig

__all__ = [
    "BertDataConfig",
    "BertModelConfig",
    "BertPretrainConfig",
    "CheckpointConfig",
    "DataConfig",
    "DistributedConfig",
    "FusedKernels",
    "GPTDataConfig",
    "GPTModelConfig",
    "GPTPretrainConfig",
    "HealthConfig",
    "LRDecayStyle",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Precision",
    "PretrainConfig",
    "Recomputation",
    "TokenizerType",
    "TrainingConfig",
]
