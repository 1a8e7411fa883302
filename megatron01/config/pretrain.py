"""The settings of a pretraining run: all groups together."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron01.config.data import BertDataConfig, DataConfig, GPTDataConfig
from megatron01.config.distributed import DistributedConfig
from megatron01.config.files import CheckpointConfig, LoggingConfig
from megatron01.config.model import BertModelConfig, GPTModelConfig, ModelConfig
from megatron01.config.optimizer import OptimizerConfig
from megatron01.config.rules import check_together
from megatron01.config.training import HealthConfig, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Everything that the pretraining of any model shares."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        check_together(self.model, self.data, self.optimizer, self.health, self.checkpoint, self.distributed)


@dataclass(frozen=True, kw_only=True)
class GPTPretrainConfig(PretrainConfig):
    """Pretrain GPT-2 on packed documents."""

    model: GPTModelConfig = field(default_factory=GPTModelConfig)
    data: GPTDataConfig = field(default_factory=GPTDataConfig)


@dataclass(frozen=True, kw_only=True)
class BertPretrainConfig(PretrainConfig):
    """Pretrain BERT on masked sentence pairs."""

    model: BertModelConfig = field(default_factory=BertModelConfig)
    data: BertDataConfig = field(default_factory=BertDataConfig)
