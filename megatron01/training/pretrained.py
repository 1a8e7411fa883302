"""Starting a new run from the weights of a trained model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megatron01.data import Tokenizer
from megatron01.data.tokenization.build import TokenizerSettings
from megatron01.distributed import ReplicaGroup, failing_together
from megatron01.errors import UserError
from megatron01.interchange.formats import read_model
from megatron01.interchange.portable import PortableModel, TokenizerFiles, check_shapes
from megatron01.models.bert import Bert
from megatron01.models.gpt2 import GPT2
from megatron01.optim import PretrainOptimizer
from megatron01.tensor_parallel import PartOfModel


@torch.no_grad()
def start_from_weights(
    optimizer: PretrainOptimizer,
    model: nn.Module,
    folder: str,
    settings: TokenizerSettings,
    tokenizer: Tokenizer,
    group: ReplicaGroup,
    part: PartOfModel,
) -> list[str]:
    """Make the weights of a trained model the master weights of an optimizer that has not taken a step.

    Called by all ranks together.

    Args:
        optimizer: of ``model``.
        model: of the run, whose weights are set too.
        folder: whatever ``read_model`` reads.
        settings: that tell the run's tokenizer, which must be that of the pretrained model.
        tokenizer: built from them.
        group: the replicas of the run.
        part: what this process holds of the model.

    Returns:
        Notes for the user.

    Raises:
        UserError: on every rank, if the model cannot be read or is not of the run's shape.
    """
    with failing_together(group, "reading the pretrained model"):
        files = TokenizerFiles(
            tokenizer_type=settings.tokenizer_type,
            vocab_file=settings.vocab_file,
            merge_file=settings.merge_file,
            tokenizer_model=settings.tokenizer_model,
        )
        pretrained = read_model(folder, files).for_vocabulary(tokenizer.vocab_size, tokenizer.name)
        weights = _weights_of_shape(pretrained, model, part.shapes)
    optimizer.fill_master_parameters(lambda name, master: part.keep(name, master, weights[name]))
    # what derives from the master weights, the model's own among it, follows as after the loading of a checkpoint
    optimizer.load_state(optimizer.consensus_state(), optimizer.replica_state())
    return list(pretrained.notes)


def _weights_of_shape(
    pretrained: PortableModel, model: nn.Module, shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    assert isinstance(model, (Bert, GPT2)), type(model)
    if type(pretrained.config) is not type(model.config):
        raise UserError(
            f"pretrained_checkpoint {pretrained.source} is a {pretrained.architecture} and this run trains another"
            " architecture; give a model of the same"
        )
    wants_pairs = isinstance(model, Bert) and model.binary_head is not None
    if pretrained.has_binary_head != wants_pairs:
        difference = (
            "no head for sentence pairs, but this run needs" if wants_pairs else "a head for sentence pairs, not"
        )
        objective = "none" if wants_pairs else "sop or nsp"
        raise UserError(f"pretrained_checkpoint {pretrained.source} has {difference} one; give --objective {objective}")
    _check_settings(pretrained, model)
    num_rows = model.embedding.word_embeddings.num_embeddings
    weights = pretrained.padded_weights(num_rows)
    expected = {name: tuple(shape) for name, shape in shapes.items()}
    check_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()}, expected, pretrained.source)
    return weights


def _check_settings(pretrained: PortableModel, model: Bert | GPT2) -> None:
    """Settings that change what the same weights compute, and show in no shape."""
    for name in ("num_attention_heads", "layernorm_epsilon", "norm_placement"):
        theirs, ours = getattr(pretrained.config, name, None), getattr(model.config, name, None)
        if theirs != ours:
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"pretrained_checkpoint {pretrained.source} has {name} {theirs}, and this run {ours};"
                f" give {flag} {theirs}"
            )
