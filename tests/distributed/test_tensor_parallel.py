"""Tensor-parallel models: losses and gradients of whole models, and random numbers that differ only where they may."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron01.config import BertModelConfig, DistributedConfig, GPTModelConfig
from megatron01.data.bert import model_batch
from megatron01.errors import UserError
from megatron01.models import GPT2, Bert
from megatron01.models.layers import KeyValueCache, compile_layers
from megatron01.models.tensor_parallel import ModelShard, build_model_shard, own_random_numbers
from megatron01.parallel import LaunchEnvironment, TensorParallelRanks, find_tensor_parallel_ranks, initialize
from megatron01.parallel.tensor_parallel import TensorParallelGroup
from megatron01.training.step import LossModule
from tests.distributed.harness import run_ranks
from tests.tiers import slow_after

VOCAB_SIZE = 17  # of four shards of 8 rows, the third holds one real id and the last none
KINDS = ("gpt", "bert post", "bert pre")


def one_replica(rank: int, size: int) -> TensorParallelRanks:
    return TensorParallelRanks(
        size=size, rank=rank, replica=0, num_replicas=1, device=torch.device("cpu"), process_group=dist.group.WORLD
    )


def build(kind: str, **changes: Any) -> nn.Module:
    shape: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "max_position_embeddings": 8,
        "make_vocab_size_divisible_by": 8,
        "init_method_std": 0.3,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **changes,
    }
    if kind == "gpt":
        return GPT2(GPTModelConfig(**shape), VOCAB_SIZE, seed=5)
    placement: Any = kind.split()[1]
    return Bert(BertModelConfig(norm_placement=placement, **shape), VOCAB_SIZE, binary_head=True, seed=5)


def loss_of(model: Any, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, VOCAB_SIZE, (2, 3, 8), generator=generator, dtype=torch.int32)
    if kind == "gpt":
        return model.loss(tokens, labels, torch.ones(3, 8))
    padding_mask = torch.ones(3, 8, dtype=torch.int64)
    padding_mask[1, 5:] = 0
    labels = torch.where((torch.rand(3, 8, generator=generator) < 0.4) & (padding_mask == 1), labels, -1)
    batch = {
        "text": tokens,
        "types": torch.randint(0, 2, (3, 8), generator=generator),
        "padding_mask": padding_mask,
        "labels": labels,
        "loss_mask": (labels >= 0).int(),
        "is_random": torch.tensor([0, 1, 0]),
    }
    # without padding, except for sequence parallelism, whose slices must have one length
    batch = {name: torch.from_numpy(v) for name, v in model_batch({k: v.numpy() for k, v in batch.items()}).items()}
    return sum(model.loss(batch).values())  # type: ignore[return-value]


def own_piece(part: ModelShard, name: str, whole: Tensor, like: Tensor) -> Tensor:
    piece, cut = torch.zeros_like(like), part.partitions.get(name)
    if cut is None:
        return whole
    cut.copy(whole, 0, piece, part.ranks.rank * piece.shape[cut.dim])
    return piece


def compare_with_whole_models(rank: int, size: int) -> dict[Any, tuple[float, float, float, dict[str, Tensor]]]:
    """By variant: both losses, the largest relative error of a gradient, and gradients of replicated parameters."""
    found = {}
    parts = one_replica(rank, size)
    warnings.simplefilter("error")  # a plan that names a missing module only causes a warning
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            for sequence_parallel in (False, True):
                whole = build(kind).to(dtype)
                part = build_model_shard(lambda kind=kind: build(kind), parts, sequence_parallel=sequence_parallel)
                model = part.model.to(dtype)
                losses = [loss_of(whole, kind), loss_of(model, kind)]
                for loss in losses:
                    loss.backward()
                worst, common = 0.0, {}
                pairs = zip(whole.named_parameters(), model.named_parameters(), strict=True)
                for (name, expected), (its_name, got) in pairs:
                    assert name == its_name and expected.grad is not None and got.grad is not None
                    assert torch.equal(own_piece(part, name, expected.detach(), got), got.detach()), name
                    scale = float(expected.grad.abs().max())
                    error = float((own_piece(part, name, expected.grad, got) - got.grad).abs().max())
                    if not name.endswith("query_key_value.bias"):  # the key's gradient is rounding noise
                        worst = max(worst, error / scale)
                    if name not in part.partitions:
                        common[name] = got.grad
                assert part.partial is not None and part.partial.replicated == set(common)
                found[kind, dtype, sequence_parallel] = (losses[0].item(), losses[1].item(), worst, common)
    return found


@pytest.mark.parametrize("size", slow_after(1, [2, 4]))
def test_losses_gradients_and_initial_weights_are_those_of_a_whole_model(size: int) -> None:
    results = run_ranks(compare_with_whole_models, size)
    for variant, (expected, loss, error, common) in results[0].items():
        is_exact = variant[1] is torch.float32
        assert loss == pytest.approx(expected, rel=1e-6 if is_exact else 3e-3), variant
        assert error < (2e-5 if is_exact else 0.1), variant
        for other in results[1:]:
            assert other[variant][1] == loss
            assert all(torch.equal(gradient, other[variant][3][name]) for name, gradient in common.items()), variant


def compile_part(rank: int, size: int, sequence_parallel: bool, dropout: float) -> list[Any]:
    """Loss, gradients and bytes sent of eager and of compiled layers, and compilations for 2 and for 3 of them."""
    from torch._dynamo.testing import CompileCounterWithBackend  # imports as much as the rest of a rank's tests

    found: list[Any] = []
    for layers, is_compiled in ((2, False), (2, True), (3, True)):
        torch.compiler.reset()
        torch.manual_seed(3)
        changes = {"num_layers": layers, "hidden_dropout": dropout, "attention_dropout": dropout}
        parts = one_replica(rank, size)
        part = build_model_shard(lambda c=changes: build("gpt", **c), parts, sequence_parallel=sequence_parallel)
        counter = CompileCounterWithBackend("aot_eager")
        if is_compiled:
            compile_layers(part.model, backend=counter)
        loss = loss_of(part.model, "gpt")
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in part.model.named_parameters()}
        found.append((loss.item(), gradients, part.bytes_sent, counter.frame_count))
    return found


@pytest.mark.parametrize(("sequence_parallel", "dropout"), slow_after(0, [(True, 0.2), (False, 0.0)]))
def test_compiled_layers_compute_the_same_and_share_their_code(sequence_parallel: bool, dropout: float) -> None:
    for eager, compiled, deeper in run_ranks(compile_part, 2, sequence_parallel, dropout):
        assert compiled[0] == eager[0] and compiled[2] == eager[2]
        assert all(torch.equal(compiled[1][name], gradient) for name, gradient in eager[1].items())
        assert compiled[3] == deeper[3] > 0


def compile_under_ddp(rank: int, size: int) -> tuple[list[str], int]:
    """Order in which the layers' gradients are reduced, and compilations."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model = build("gpt", num_layers=3)
    counter = CompileCounterWithBackend("aot_eager")
    compile_layers(model, backend=counter)
    module = DistributedDataParallel(LossModule(model), bucket_cap_mb=0.003)
    order: list[str] = []
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def note(_, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, and these are text
        order.extend(name.split(".")[2] for p in bucket.parameters() if ".layers." in (name := names[id(p)]))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    module.register_comm_hook(None, note)
    tokens = torch.arange(24).view(3, 8) % VOCAB_SIZE
    for _ in range(2):  # buckets are built in the order of the first step
        order.clear()
        module(tokens, tokens, torch.ones(3, 8)).backward()
    return order, counter.frame_count


def test_distributed_data_parallel_gets_the_gradients_of_compiled_layers_layer_by_layer() -> None:
    for order, compilations in run_ranks(compile_under_ddp, 2):
        assert order == sorted(order, reverse=True) and set(order) == {"0", "1", "2"}
        assert compilations == 1, "graphs were cut at the ends of buckets"


def drop_out(rank: int, size: int) -> dict[str, Any]:
    parts = one_replica(rank, size)
    group = TensorParallelGroup(dist.group.WORLD)
    torch.manual_seed(11)
    own, shared = nn.Dropout(0.5), nn.Dropout(0.5)
    own_random_numbers(own, group=group)
    masks = [own(torch.ones(200)), shared(torch.ones(200)), own(torch.ones(200))]
    own.eval()
    before = torch.get_rng_state()
    assert torch.equal(own(torch.ones(3)), torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before), "an evaluation would change the training after it"
    results: dict[str, Any] = {"masks": masks}
    for kind in KINDS:
        for sequence_parallel in (False, True):
            for recompute in ("none", "full", "selective"):
                changes = {"hidden_dropout": 0.2, "attention_dropout": 0.2, "recompute_activations": recompute}
                part = build_model_shard(
                    lambda kind=kind, changes=changes: build(kind, **changes),
                    parts,
                    sequence_parallel=sequence_parallel,
                )
                torch.manual_seed(5)
                dropped: dict[str, list[Tensor]] = {}
                for name, module in part.model.named_modules():
                    seen: list[Tensor] = []
                    if name.endswith("query_key_value"):  # inside of attention, whose masks torch does not show
                        module.register_forward_hook(lambda *_, seen=seen: seen.append(torch.get_rng_state()))
                    elif isinstance(module, nn.Dropout):
                        module.register_forward_hook(lambda _, inputs, output, seen=seen: seen.append(output == 0))
                    else:
                        continue
                    dropped[name] = seen
                loss = loss_of(part.model, kind)
                loss.backward()
                gradients = {name: p.grad for name, p in part.model.named_parameters()}
                common = {name: gradient for name, gradient in gradients.items() if name not in part.partitions}
                results[f"{kind} {sequence_parallel} {recompute}"] = (
                    loss.item(),
                    gradients,
                    common,
                    torch.get_rng_state(),
                    dropped,
                )
    return results


def test_masks_are_equal_in_replicated_regions_and_differ_in_others() -> None:
    """Recomputation sees the dropout masks of the forward pass, and the shared generator is equal on all ranks."""
    first, second = run_ranks(drop_out, 2)
    (one, shared, next_one), (other, its_shared, _) = first.pop("masks"), second.pop("masks")
    assert torch.equal(shared, its_shared)
    assert not torch.equal(one, other) and not torch.equal(one, next_one) and not torch.equal(one, shared)
    for variant, (loss, gradients, common, state, dropped) in first.items():
        its_loss, _, its_common, its_state, its_dropped = second[variant]
        for name, seen in dropped.items():
            is_own = name.endswith("query_key_value") or " True " in variant  # of own heads, or a slice of the sequence
            assert seen and all(torch.equal(a, b) != is_own for a, b in zip(seen, its_dropped[name], strict=True)), (
                variant,
                name,
            )
        assert loss == its_loss, variant
        assert torch.equal(state, its_state), variant
        assert all(torch.equal(gradient, its_common[name]) for name, gradient in common.items()), variant
        kind_of_run, _, recompute = variant.rpartition(" ")
        if recompute != "none":
            stored = first[f"{kind_of_run} none"]
            assert loss == stored[0]
            assert all(torch.equal(gradient, stored[1][name]) for name, gradient in gradients.items()), variant


def ask_wrongly(rank: int, size: int) -> list[str]:
    parts = one_replica(rank, size)
    model = build_model_shard(lambda: build("gpt"), parts).model
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    messages = []
    for mistake in (
        lambda: model(tokens),
        lambda: model.next_token_logits(tokens, KeyValueCache(2, 8, torch.zeros(1, dtype=torch.int64))),
        lambda: model.loss(tokens, tokens + VOCAB_SIZE, torch.ones(1, 8)),
        lambda: build_model_shard(lambda: nn.Linear(2, 2), parts),
    ):
        with pytest.raises((UserError, RuntimeError)) as caught:
            mistake()
        messages.append(str(caught.value))
    return messages


def test_what_a_part_cannot_do_is_refused() -> None:
    for logits, next_logits, label, model in run_ranks(ask_wrongly, 2):
        assert "never gathered" in logits and "--tensor-model-parallel-size 1" in logits and next_logits == logits
        assert "outside of the vocabulary" in label
        assert "Linear has no plan" in model


def freeze(rank: int, size: int) -> set[str]:
    def with_frozen_vocabulary() -> nn.Module:
        model: Any = build("gpt")
        model.embedding.requires_grad_(False)
        return model

    return set(build_model_shard(with_frozen_vocabulary, one_replica(rank, size)).frozen())


def test_what_is_frozen_in_the_whole_model_is_frozen_in_its_parts() -> None:
    names = {f"embedding.{name}_embeddings.weight" for name in ("word", "position")}
    assert run_ranks(freeze, 2) == [names, names]


def find(rank: int, size: int, num_parts: int) -> Any:
    config = DistributedConfig(threads_per_replica=1, tensor_model_parallel_size=num_parts)
    with initialize(LaunchEnvironment.read(os.environ), config) as group:
        try:
            parts = find_tensor_parallel_ranks(group, config)
        except UserError as error:
            return str(error)
        return parts.replica, parts.rank, parts.num_replicas, parts.gather([rank, 0.5])


def test_replicas_are_consecutive_ranks_of_one_node() -> None:
    places = run_ranks(find, 4, 2)
    assert [place[:3] for place in places] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert places[0][3] == places[1][3] == [[0, 0.5], [1, 0.5]] and places[3][3] == [[2, 0.5], [3, 0.5]]
    assert all("is 3, but 4 process(es)" in message for message in run_ranks(find, 4, 3))
    assert all("ranks 0 to 1" in message for message in run_ranks(find, 2, 2, local_world_size=1))
