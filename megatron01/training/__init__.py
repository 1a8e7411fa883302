"""The training loop: from settings to a trained model, resumable at any step."""

from megatron01.training.consistency import ReplicasDiverged
from megatron01.training.pretrain import pretrain
from megatron01.training.trainer import Trainer

__all__ = ["ReplicasDiverged", "Trainer", "pretrain"]
