"""A small model after some steps of training, saved as training saves it; and a state dict of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron01.checkpoint.manifest import CheckpointMetadata
from megatron01.checkpoint.reshard import ShardLayout, named_tensors
from megatron01.config import BertPretrainConfig, DistributedConfig, PretrainConfig
from megatron01.config.yaml_files import dump_yaml
from megatron01.convert.huggingface import hf_tensors
from megatron01.convert.portable import new_model
from megatron01.data import build_tokenizer
from megatron01.optim import build_optimizer, build_schedule
from megatron01.parallel import LaunchEnvironment, initialize
from megatron01.training.state import NamedState, model_name
from tests.unit.checkpoint.saved import save_tensors


def save_trained(config: PretrainConfig, folder: Path, *, steps: int = 11) -> dict[str, torch.Tensor]:
    """Train on random gradients and save; returns the synchronized weights."""
    tokenizer = build_tokenizer(config.data)
    binary_head = isinstance(config, BertPretrainConfig) and config.data.objective != "none"
    model = new_model(config.model, tokenizer.vocab_size, binary_head=binary_head)
    generator = torch.Generator().manual_seed(5)
    optimizer = build_optimizer(model, config, build_schedule(config.optimizer, 100), None)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    metadata = CheckpointMetadata(
        iteration=steps,
        consumed_samples=steps,
        world_size=1,
        optimizer=config.optimizer.optimizer,
        tokenizer_fingerprint=tokenizer.fingerprint,
        parameters={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        device="cpu",
        model=model_name(model),
    )
    state = NamedState(optimizer, ShardLayout(metadata.parameters, {}), config.optimizer.block_size)
    with initialize(LaunchEnvironment.read({}), DistributedConfig(threads_per_replica=1)) as group:
        save_tensors(
            folder,
            metadata,
            replicated=named_tensors(state.replicated(), state.layout),
            replica=state.replica(),
            replica_values={},
            config_yaml=dump_yaml(config),
            group=group,
        )
    return {str(name): tensor.clone() for name, tensor in optimizer.master_parameters().items()}


TIED = {  # copy -> original
    "lm_head.weight": "transformer.wte.weight",
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def to_hf(weights: Mapping[str, torch.Tensor], config, vocab_size: int) -> dict[str, torch.Tensor]:
    """The state dict of transformers' class, tied tensors included, from that of a model of this project."""
    exported = dict(hf_tensors(weights, config, vocab_size))
    return exported | {copy: exported[name] for copy, name in TIED.items() if name in exported}
