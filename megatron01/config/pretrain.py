"""The settings of a pretraining run: all groups together."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron01.config.data import BertDataConfig, DataConfig, GPTDataConfig
from megatron01.config.distributed import DistributedConfig
from megatron01.config.model import BertModelConfig, GPTModelConfig, ModelConfig
from megatron01.config.optimizer import OptimizerConfig
from megatron01.config.registry import baseline, find_optimizer, optimizers
from megatron01.config.training import CheckpointConfig, HealthConfig, LoggingConfig, TrainingConfig
from megatron01.errors import require

# What settings of several groups must be together; what concerns one group alone is checked there.


def check_together(
    model: ModelConfig,
    data: DataConfig,
    optimizer: OptimizerConfig,
    health: HealthConfig,
    checkpoint: CheckpointConfig,
    distributed: DistributedConfig,
) -> None:
    """Raises UserError if two of these groups contradict each other."""
    require(
        data.seq_length <= model.max_position_embeddings,
        f"seq_length {data.seq_length} is above max_position_embeddings {model.max_position_embeddings}",
    )
    require(
        health.on_loss_spike != "roll_back" or checkpoint.save is not None,
        "on_loss_spike is roll_back, but no checkpoints are saved; give --save",
    )
    _check_optimizer(optimizer, distributed)
    _check_tensor_parallelism(model, data, distributed)


def _check_optimizer(optimizer: OptimizerConfig, distributed: DistributedConfig) -> None:
    """Raises UserError if the optimizer cannot exchange between these replicas."""
    name = optimizer.optimizer
    if optimizer.auto:
        choice = " and ".join(choice for choice, spec in optimizers().items() if spec.automatic)
        require(
            find_optimizer(name).automatic,
            f"auto chooses between {choice}, but optimizer is {name}; leave one of the two settings out",
        )
        require(
            distributed.comm_backend == "torch" and distributed.replica == "process",
            f"auto may choose {baseline()}, which needs comm_backend torch and replica process; leave auto out",
        )
        require(
            optimizer.state_dtype == "fp32",
            f"auto may choose {baseline()}, whose state is fp32, but state_dtype is bf16; leave one of the two settings"
            " out",
        )
    if find_optimizer(name).ddp:
        require(
            distributed.comm_backend == "torch",
            f"optimizer {name} cannot exchange over MPI; give --comm-backend torch, or another optimizer",
        )
        require(
            distributed.replica == "process",
            f"optimizer {name} has no replicas of several processes; give --replica process, or another optimizer",
        )


def _check_tensor_parallelism(model: ModelConfig, data: DataConfig, distributed: DistributedConfig) -> None:
    """Raises UserError if the model cannot be partitioned across tensor-parallel ranks."""
    size = distributed.tensor_model_parallel_size
    for name, value in (
        ("num_attention_heads", model.num_attention_heads),
        ("ffn_hidden_size", model.feed_forward_size),
    ):
        require(
            value % size == 0,
            f"{name} {value} is not divisible by tensor_model_parallel_size {size}; change one of the two",
        )
    require(
        not distributed.sequence_parallel or data.seq_length % size == 0,
        f"seq_length {data.seq_length} is not divisible by tensor_model_parallel_size {size}, which"
        " sequence_parallel asks for; change one of the two",
    )
    require(
        not distributed.sequence_parallel or model.fused_layernorm != "apex",
        "fused_layernorm apex cannot be combined with sequence_parallel; leave one of the two out",
    )


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
