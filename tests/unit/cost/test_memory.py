"""Planned memory against the tensors that are allocated."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron01 import cli
from megatron01.comm.payload import BlockLayout, row_range
from megatron01.comm.topology import build_topology
from megatron01.config import (
    BertPretrainConfig,
    DistributedConfig,
    GPTPretrainConfig,
    OptimizerConfig,
    PretrainConfig,
    TrainingConfig,
)
from megatron01.cost.memory import (
    _TORCH_UPDATE_BYTES,
    _TORCH_UPDATE_ELEMENTS,
    Memory,
    PassBytes,
    _owned_blocks,
    _Storages,
    accumulates_in_fp32,
    flat_state_bytes,
    memory,
    parameter_sizes,
    pass_bytes,
)
from megatron01.models import GPT2, Bert, cross_entropy
from megatron01.models.cross_entropy import CHUNK_BYTES
from megatron01.optim import build_optimizer, build_schedule
from megatron01.optim.kernels.specification import TorchKernels
from megatron01.optim.local_update import Numbers, Phase, Rule, Slices
from megatron01.parallel import LaunchEnvironment, initialize
from tests.distributed.harness import run_ranks

ROOT = Path(__file__).parents[3]
OPTIMIZERS = ["adam", "zero_one_adam", "one_bit_adam", "bin_sgdm", "soft_sign_sgd", "sgdm"]
TRAINING = TrainingConfig(micro_batch_size=3, train_iters=10)


def gpt_config(**changes: Any) -> GPTPretrainConfig:
    default = GPTPretrainConfig()
    model = dataclasses.replace(
        default.model, num_layers=2, hidden_size=32, num_attention_heads=2, max_position_embeddings=16, **changes
    )
    data = dataclasses.replace(default.data, seq_length=16)
    return GPTPretrainConfig(model=model, data=data, training=TRAINING)


def bert_config() -> BertPretrainConfig:
    default = BertPretrainConfig()
    model = dataclasses.replace(
        default.model, num_layers=1, hidden_size=32, num_attention_heads=2, max_position_embeddings=16
    )
    return BertPretrainConfig(model=model, data=dataclasses.replace(default.data, seq_length=16), training=TRAINING)


def build(config: PretrainConfig) -> GPT2 | Bert:
    if isinstance(config, BertPretrainConfig):
        return Bert(config.model, 100, binary_head=True)
    assert isinstance(config, GPTPretrainConfig)
    return GPT2(config.model, 100)


def planned_passes(config: PretrainConfig, *, on_gpu: bool, micro_batches: int = 1) -> PassBytes:
    with torch.device("meta"):
        model = build(config)
    return pass_bytes(config, model, on_gpu=on_gpu, micro_batches=micro_batches)


def bytes_of_state(rank: int, world_size: int, settings: OptimizerConfig) -> tuple[int, list[int]]:
    config = dataclasses.replace(gpt_config(), optimizer=settings)
    model = build(config)
    optimizer = build_optimizer(model, config, build_schedule(config.optimizer, 10), dist.group.WORLD)
    state = {**optimizer.replicated_state(), **optimizer.replica_state()}
    del state["scalars"]
    return sum(tensor.nbytes for tensor in state.values()), [parameter.numel() for parameter in model.parameters()]


@pytest.mark.parametrize(("name", "state_dtype"), [*((name, "fp32") for name in OPTIMIZERS), ("zero_one_adam", "bf16")])
def test_state_is_what_an_optimizer_holds(name: Any, state_dtype: Any) -> None:
    """On two replicas, whose errors differ by a block where the blocks do not divide evenly."""
    settings = OptimizerConfig(optimizer=name, lr=1e-3, lr_warmup_iters=2, state_dtype=state_dtype, block_size=256)
    for real, sizes in run_ranks(bytes_of_state, 2, settings):
        planned = memory(
            PretrainConfig(optimizer=settings, training=TRAINING),
            nodes=1,
            processes_per_node=2,
            parameter_sizes=tuple(sizes),
            passes=PassBytes(0, 0, 0),
            on_gpu=False,
        )
        if name == "adam":
            # with DistributedDataParallel the model's weights are the master weights; AdamW holds both moments
            assert planned.state == pytest.approx(real - planned.weights, rel=0.01)
        else:
            blocks = sum(-(-size // settings.block_size) for size in sizes)
            live = blocks * settings.block_size / 4
            assert planned.state - live == pytest.approx(real, abs=4 * settings.block_size)


def allocates_for_residuals(rank: int, world_size: int, config: PretrainConfig) -> bool:
    """Whether u is not free for the new residual of quantized gradients at some full step of a run."""
    model = build(config)
    steps = config.training.train_iters
    optimizer: Any = build_optimizer(model, config, build_schedule(config.optimizer, steps), dist.group.WORLD)
    allocated = []
    begin = optimizer._quantized.begin

    def watched(loss_scale: float) -> None:
        begin(loss_scale)
        allocated.append(optimizer._quantized._value is not optimizer._local.u)

    optimizer._quantized.begin = watched
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return any(allocated)


@pytest.mark.parametrize("warm_up", [4, 5])
def test_full_steps_that_do_not_follow_a_synchronization_need_more(warm_up: int) -> None:
    """With intervals of 2 after an odd warm-up."""
    config = dataclasses.replace(
        gpt_config(),
        optimizer=OptimizerConfig(lr=1e-3, lr_warmup_iters=warm_up, variance_kappa=4),
        training=TrainingConfig(train_iters=16),
    )
    found = run_ranks(allocates_for_residuals, 2, config)
    assert found == [warm_up == 5] * 2

    def exchange(**changes: Any) -> int:
        run = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **changes))
        passes = PassBytes(0, 0, 0)
        layout: Any = {"nodes": 1, "processes_per_node": 2, "parameter_sizes": (1024 * 9,), "on_gpu": False}
        return memory(run, passes=passes, **layout).exchange

    for state_dtype, size in (("fp32", 4), ("bf16", 2)):
        more = exchange(state_dtype=state_dtype) - exchange(state_dtype=state_dtype, lr_warmup_iters=4)
        assert more == (size * 9 * 1024 if found[0] else 0)


def test_quantized_gradients_of_one_bit_adam_need_no_step_at_which_it_freezes() -> None:
    """Training alone can tell that step, and the check at a start of a run asks for the memory before it."""
    optimizer = OptimizerConfig(optimizer="one_bit_adam", lr=1e-3, lr_warmup_iters=2, gradient_wire_dtype="4bit")
    config = dataclasses.replace(gpt_config(), optimizer=optimizer)
    assert run_ranks(allocates_for_residuals, 2, config) == [False] * 2
    layout: Any = {"nodes": 1, "processes_per_node": 2, "parameter_sizes": (1024 * 9,), "on_gpu": False}
    known = dataclasses.replace(config, optimizer=dataclasses.replace(optimizer, freeze_step=3))
    assert memory(config, passes=PassBytes(0, 0, 0), **layout) == memory(known, passes=PassBytes(0, 0, 0), **layout)


def bytes_made(rank: int, world_size: int, cases: list[Any], sharded: bool) -> list[tuple[int, int, Memory]]:
    """By optimizer and compressor: bytes of its state, of all storages that it has allocated, and what was planned."""
    found = []
    distributed = DistributedConfig(threads_per_replica=1, replica="node", shard_optimizer=sharded)
    with initialize(LaunchEnvironment.read(os.environ), distributed) as group:
        for name, compressor in cases:
            settings = OptimizerConfig(
                optimizer=name, lr=1e-3, lr_warmup_iters=2, freeze_step=3, bucket_elements=1 << 14, block_size=256,
                compressor=compressor,
            )  # fmt: skip
            training = dataclasses.replace(TRAINING, precision="bf16")
            config = PretrainConfig(optimizer=settings, training=training, distributed=distributed)
            model = nn.Sequential(*[nn.Linear(120, 100) for _ in range(10)]).bfloat16()
            topology = build_topology(group, distributed)
            # the weights move to a flat buffer, which is counted; those that they leave must not be freed meanwhile, as
            # storages are known by their addresses
            before = [parameter.data for parameter in model.parameters()]
            with _Storages(before) as storages:
                optimizer = build_optimizer(model, config, build_schedule(settings, 10), topology)
                gc.collect()
            state = {**optimizer.replicated_state(), **optimizer.replica_state()}
            del state["scalars"]
            planned = memory(
                config,
                nodes=2,
                processes_per_node=2,
                parameter_sizes=tuple(parameter.numel() for parameter in model.parameters()),
                passes=PassBytes(0, 0, 0),
                on_gpu=False,
            )
            # a parameter's storage is a part of the buffer, which is counted already
            made = storages.bytes - sum(parameter.nbytes for parameter in model.parameters())
            found.append((sum(tensor.nbytes for tensor in state.values()), made, planned))
            del optimizer
    return found


@pytest.mark.slow
def test_divided_state_and_buffers_are_what_an_optimizer_holds() -> None:
    cases = [(name, "one_bit") for name in OPTIMIZERS if name != "adam"]
    cases += [("one_bit_adam", "none"), ("bin_sgdm", "none")]
    whole, divided = (run_ranks(bytes_made, 4, cases, sharded, local_world_size=2) for sharded in (False, True))
    for index, (name, _) in enumerate(cases):
        for result, undivided in zip(divided, whole, strict=True):
            state, made, planned = result[index]
            assert state == pytest.approx(undivided[index][0] / 2, rel=0.3 if "adam" in name or "bin" in name else 0.02)
            assert planned.weights + planned.state + planned.exchange == pytest.approx(made, rel=0.1), cases[index]
    state, _, planned = divided[0][0]
    live = planned.state - state
    assert 0 < live < 0.02 * state  # the first process has the largest share


def planned_memory(sizes: tuple[int, ...], nodes: int, processes_per_node: int, **settings: Any) -> Memory:
    """What is planned beside the passes, by settings of all sections."""
    training = dataclasses.replace(TRAINING, precision=settings.pop("precision", "fp32"))
    distributed = DistributedConfig(hierarchical=settings.pop("hierarchical", "auto"))
    config = PretrainConfig(optimizer=OptimizerConfig(**settings), training=training, distributed=distributed)
    layout: Any = {"nodes": nodes, "processes_per_node": processes_per_node, "parameter_sizes": sizes}
    return memory(config, passes=PassBytes(0, 0, 0), on_gpu=False, **layout)


def test_master_weights_of_adam_are_beside_those_of_16_bits() -> None:
    for precision, weights, state in (("fp32", 4, 8), ("bf16", 2, 12)):
        planned = planned_memory((1000,), 1, 1, optimizer="adam", precision=precision)
        assert (planned.weights, planned.state) == (1000 * weights, 1000 * state)


def test_without_hierarchical_exchanges_every_process_counts_as_a_node() -> None:
    settings: dict[str, Any] = {"optimizer": "one_bit_adam", "freeze_step": 3, "lr_warmup_iters": 2}
    flat = planned_memory((1 << 20,), 2, 4, hierarchical="off", **settings)
    assert flat == planned_memory((1 << 20,), 8, 1, **settings)
    assert flat.state > planned_memory((1 << 20,), 2, 4, **settings).state


def test_buffers_of_an_exchange() -> None:
    """Of whole values at most 2 buckets at a time, on several nodes of several processes 4; of bits of all elements."""
    values: dict[str, Any] = {"optimizer": "sgdm", "precision": "bf16", "bucket_elements": 1 << 14}
    sent_and_received = 2 * 2  # bytes of an element
    for elements, flat, nested in ((1 << 10,) * 3, (1 << 15,) * 3, (1 << 20, 1 << 15, 1 << 16)):
        assert planned_memory((elements,), 2, 1, **values).exchange == sent_and_received * flat
        # half of them leave the node, and its whole result comes back
        assert planned_memory((elements,), 2, 2, **values).exchange == sent_and_received * nested * 3 // 2
    bits = planned_memory((1 << 10,), 2, 2, optimizer="bin_sgdm", precision="bf16").exchange
    assert bits == (1 << 10) * 2 // 8 + (1 << 10) * 2 * 2  # and, in bf16, what is summed inside the node


@pytest.mark.parametrize(("num_blocks", "bucket_elements"), [(10, 1024), (9, 1 << 14), (8, 100), (3, 1 << 20)])
def test_the_first_rank_of_a_node_owns_the_first_rows(num_blocks: int, bucket_elements: int) -> None:
    blocks = BlockLayout(torch.full((num_blocks,), 256, dtype=torch.int32), 256)
    owned = 0
    for first, last in blocks.buckets(bucket_elements, 4):
        begin, end = row_range(first, last, 0, 4)
        owned += end - begin
    assert _owned_blocks(OptimizerConfig(block_size=256), num_blocks, bucket_elements, 4) == owned


def test_sums_in_fp32_are_of_several_micro_batches_of_16_bits() -> None:
    def found(precision: Any, micro_batches: int, **settings: Any) -> bool:
        training = dataclasses.replace(TRAINING, precision=precision, accumulate_grads_in_fp32=True)
        config = PretrainConfig(optimizer=OptimizerConfig(**settings), training=training)
        return accumulates_in_fp32(config, micro_batches)

    assert found("bf16", 2) and not found("bf16", 1) and not found("fp32", 2) and not found("bf16", 2, optimizer="adam")


def test_errors_and_buffers_shrink_where_processes_share_a_node() -> None:
    settings, elements = OptimizerConfig(lr=1e-3, gradient_wire_dtype="bf16"), 1 << 20
    flat = flat_state_bytes(settings, 16, 1, elements)
    shared = flat_state_bytes(settings, 16, 8, elements)
    assert flat == pytest.approx(elements * (20 + 4 / 16 + 0.25))
    assert shared == pytest.approx(elements * (16 + (4 + 4 / 16 + 4) / 8 + 0.25))
    alone = flat_state_bytes(settings, 1, 1, elements)
    assert alone == pytest.approx(elements * (16 + 0.25))
    quantized = flat_state_bytes(OptimizerConfig(lr=1e-3), 16, 1, elements)  # by default gradients have residuals, too
    assert quantized - flat == pytest.approx(elements * (4 + 4 / 16))


@pytest.mark.parametrize(
    "make",
    [
        gpt_config,
        bert_config,
        lambda: gpt_config(recompute_activations="full"),
        lambda: gpt_config(recompute_activations="selective"),
    ],
)
def test_passes_on_tensors_without_contents_are_like_real_ones(make: Any) -> None:
    config = make()
    planned = planned_passes(config, on_gpu=False)
    model = build(config)
    tokens = torch.zeros(3, 16, dtype=torch.int64)
    masked = torch.full_like(tokens, -1)
    masked.view(-1)[: round(0.15 * tokens.numel())] = 1
    batch: tuple[Any, ...] = (tokens, tokens, torch.ones(3, 16))
    if isinstance(config, BertPretrainConfig):
        names = ("text", "types", "padding_mask", "loss_mask")
        batch = ({name: tokens for name in names} | {"labels": masked, "is_random": tokens[:, 0]},)
    inputs = batch[0].values() if isinstance(batch[0], dict) else batch
    with (
        torch.autograd.set_multithreading_enabled(False),
        _Storages([*model.parameters(), *model.buffers(), *inputs]) as storages,
    ):
        losses = model.loss(*batch)
        loss = torch.stack(list(losses.values())).sum() if isinstance(losses, dict) else losses
        saved = storages.bytes
        loss.backward()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert planned.saved == pytest.approx(saved, rel=0.03)
    assert planned.peak == pytest.approx(storages.peak, rel=0.03)
    assert planned.peak >= gradients


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_in_buckets_are_there_all_the_time(recompute: Any) -> None:
    config = gpt_config(recompute_activations=recompute)
    passes = planned_passes(config, on_gpu=False)
    model = build(config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # like DistributedDataParallel's views of its buckets
    gradients = [parameter.grad for parameter in model.parameters()]
    tokens, ones = torch.zeros(3, 16, dtype=torch.int64), torch.ones(3, 16)
    with (
        torch.autograd.set_multithreading_enabled(False),
        _Storages([*model.parameters(), *model.buffers(), *gradients, tokens, ones]) as storages,  # type: ignore[list-item]
    ):
        model.loss(tokens, tokens, ones).backward()
    assert passes.without_gradients == pytest.approx(storages.peak, rel=0.03)

    def planned(replicas: int) -> Memory:
        sizes = tuple(parameter.numel() for parameter in model.parameters())
        adam = dataclasses.replace(config, optimizer=OptimizerConfig(optimizer="adam", lr=1e-3))
        return memory(adam, nodes=replicas, processes_per_node=1, parameter_sizes=sizes, passes=passes, on_gpu=False)

    assert planned(1).passes == passes.peak + passes.unused
    assert planned(2).passes == passes.without_gradients + passes.unused + planned(2).weights


def test_gpus_keep_no_scores_and_recomputing_keeps_little() -> None:
    def saved(on_gpu: bool, **changes: Any) -> int:
        return planned_passes(gpt_config(**changes), on_gpu=on_gpu).saved

    assert saved(True) < saved(False)
    held = planned_passes(gpt_config(), on_gpu=False)  # holes of the heap; all tensors are small here
    assert held.saved / 3 <= held.unused < held.saved / 3 * 1.1
    assert planned_passes(gpt_config(), on_gpu=True).unused == 0
    assert saved(True, recompute_activations="full") < 0.5 * saved(True)
    # for each of 2 layers and 48 tokens: the outputs of two norms (32) and the GELU (128)
    assert saved(True) - saved(True, recompute_activations="selective") == 2 * 48 * (2 * 32 + 128) * 4
    # without fused kernels also the attention scores, of 3 x 2 heads: probabilities before and after dropout, its mask
    scores = saved(False) - saved(False, recompute_activations="selective") - 2 * 48 * (2 * 32 + 128) * 4
    assert scores > 2 * 3 * 2 * 16 * 16 * 4


def test_what_recomputing_gives_back_leaves_no_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron01.cost.memory.LARGE_BLOCK", 1)
    for recompute, has_holes in (("none", True), ("selective", False), ("full", False)):
        planned = planned_passes(gpt_config(recompute_activations=recompute), on_gpu=False)
        assert (planned.unused > 0) == has_holes


def test_a_bert_of_words_alone_has_no_head_for_sentence_pairs() -> None:
    config = bert_config()
    words = dataclasses.replace(config, data=dataclasses.replace(config.data, objective="none"))
    pairs, alone = (sum(parameter_sizes(one)[0]) for one in (config, words))
    assert pairs - alone == (32 * 32 + 32) + (2 * 32 + 2)  # pooler and head


def test_gradients_of_an_earlier_micro_batch_are_there() -> None:
    one, two = (planned_passes(gpt_config(), on_gpu=True, micro_batches=count).peak for count in (1, 2))
    assert two > one


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    flags = ["plan", "--memory", "--num-layers", "1", "--micro-batch-size", "2", "--seq-length", "64"]
    with pytest.raises(SystemExit):
        cli.main([*flags, "--gpu", "l4"])
    printed = capsys.readouterr().out
    assert "zero_one_adam" in printed and "of 24" in printed and " left" in printed
    with pytest.raises(SystemExit):
        cli.main([*flags, "--json", "--tensor-model-parallel-size", "2"])
    found = json.loads(capsys.readouterr().out)
    assert found["zero_one_adam"]["total"] > found["adam"]["total"] > 0
    with pytest.raises(SystemExit):
        cli.main([*flags, "--json"])
    whole = json.loads(capsys.readouterr().out)
    assert found["adam"]["passes"] < 0.6 * whole["adam"]["passes"]  # those of half a model
    # two processes that hold one replica have nobody to exchange with, and all micro-batches
    flags += ["--nodes", "1", "--processes-per-node", "2", "--tensor-model-parallel-size", "2"]
    with pytest.raises(SystemExit):
        cli.main([*flags, "--json"])
    assert {one["exchange"] for one in json.loads(capsys.readouterr().out).values()} == {0}
    with pytest.raises(SystemExit):
        cli.main([*flags, "--global-batch-size", "16"])
    assert "one process of 2, " in (printed := capsys.readouterr().out) and "8 x 2 sequences of 64 a step" in printed


def test_the_command_with_nodes_as_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "plan",
        "--memory",
        "--json",
        "--num-layers",
        "1",
        "--seq-length",
        "64",
        "--gpu",
        "rtx-3090",
        "--nodes",
        "4",
    ]
    flags += ["--processes-per-node", "8", "--replica", "node"]

    def found(*more: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as ended:
            cli.main([*flags, *more])
        assert not ended.value.code
        numbers: dict[str, Any] = json.loads(capsys.readouterr().out)
        return numbers

    whole, sharded = found(), found("--shard-optimizer")
    assert sharded["zero_one_adam"]["state"] < 0.2 * whole["zero_one_adam"]["state"]
    assert sharded["adam"] == whole["adam"]  # its replicas are processes


def test_sums_in_fp32_are_counted_where_there_are_some(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    flags = ["plan", "--memory", "--json", "--num-layers", "1", "--seq-length", "64", "--precision", "bf16"]
    flags += ["--micro-batch-size", "2", "--global-batch-size", "128"]

    def passes(*more: str) -> tuple[int, int]:
        with pytest.raises(SystemExit):
            cli.main([*flags, *more])
        found = json.loads(capsys.readouterr().out)
        return found["adam"]["passes"], found["sgdm"]["passes"]

    adam, sgdm = passes("--accumulate-grads-in-fp32")
    adam_in_bf16, sgdm_in_bf16 = passes("--no-accumulate-grads-in-fp32")
    assert adam == adam_in_bf16  # DistributedDataParallel sums its gradients, in their own dtype
    assert sgdm > sgdm_in_bf16


@pytest.mark.parametrize("phase", [Phase(*([True] * 5)), Phase(gradient=True, write_weights=True)])
def test_temporaries_of_plain_torch_on_a_gpu_are_known(phase: Phase) -> None:
    kernels, size = TorchKernels(torch.device("cuda")), 1 << 12
    assert kernels.range_elements == _TORCH_UPDATE_ELEMENTS
    numbers = Numbers(
        rule=Rule.ADAPTIVE,
        multiplier=0.5,
        beta1=0.9,
        eps=1e-8,
        variance_decay=0.999,
        inverse_correction=1.0,
        kept=1.0,
        weight=1.0,
        total=1.0,
        step_size=1e-3,
        of_momentum=0.1,
        bound=1.0,
        decay=0.99,
        never_falls=False,
        keeps_momentum=True,
        takes_momentum=phase.exchange,
    )
    with FakeTensorMode():
        x, v, m, u, gradients, weights = (torch.empty(size) for _ in range(6))
        with _Storages([x, v, m, u, gradients, weights]) as storages:
            kernels.update(phase, numbers, Slices(x, v, m, u, weights, gradients))
    assert storages.peak == _TORCH_UPDATE_BYTES * size


def test_a_gpu_that_the_kernels_do_not_serve_needs_more_where_an_update_does() -> None:
    def total(sizes: tuple[int, ...], **settings: Any) -> int:
        passes = PassBytes(saved=0, peak=settings.pop("peak"), without_gradients=0)
        optimizer = OptimizerConfig(optimizer=settings.pop("optimizer", "zero_one_adam"))
        config = dataclasses.replace(gpt_config(), optimizer=optimizer)
        given: dict[str, Any] = {"nodes": 1, "processes_per_node": 2, "on_gpu": True, **settings}
        return memory(config, parameter_sizes=sizes, passes=passes, **given).total

    small, large = (1 << 20,), (1 << 28,)
    for sizes, elements in ((small, 1 << 20), (large, 1 << 26)):
        gradients = 4 * sizes[0]
        assert total(sizes, peak=gradients, plain_torch=True) - total(sizes, peak=gradients) == 24 * elements
    assert total(small, peak=10**9, plain_torch=True) == total(small, peak=10**9)  # the passes need more
    adam = {"optimizer": "adam", "peak": 4 << 20}
    assert total(small, plain_torch=True, **adam) == total(small, **adam)


def test_a_plan_for_such_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for gpu, is_said in (("t4", True), ("a100", False)):
        with pytest.raises(SystemExit):
            cli.main(["plan", "--memory", "--num-layers", "1", "--seq-length", "64", "--gpu", gpu])
        assert ("the Triton kernels do not support this GPU" in capsys.readouterr().out) == is_said


@pytest.mark.slow
def test_a_gpus_larger_chunks_of_logits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpt_config(make_vocab_size_divisible_by=1 << 16)
    config = dataclasses.replace(config, training=dataclasses.replace(TRAINING, micro_batch_size=48))
    before = planned_passes(config, on_gpu=True).peak  # all logits at once, 200 MB
    monkeypatch.setitem(CHUNK_BYTES, "cuda", 1)  # one token at a time
    assert planned_passes(config, on_gpu=True).peak < before - 1e8


def test_the_softmax_of_plain_torch_on_a_gpu_is_counted() -> None:
    config = dataclasses.replace(gpt_config(), training=dataclasses.replace(TRAINING, micro_batch_size=48))
    peaks = []
    for plain_torch in (False, True):
        with torch.device("meta"):
            model = GPT2(config.model, 50257)
        peaks.append(pass_bytes(config, model, on_gpu=True, micro_batches=1, plain_torch=plain_torch).peak)
    assert 0.9 * 2**27 < peaks[1] - peaks[0] <= 2**27


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_prediction_computes_no_softmax_but_one_piece(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    """It went through the logits of all tokens, piece by piece, which took minutes for large batches."""
    monkeypatch.setitem(cross_entropy.SOFTMAX_ELEMENTS, "cpu", 64)
    config = gpt_config()
    with torch.device("meta"):
        model = GPT2(config.model, 53)
    with CountedSoftmax() as counted:
        pass_bytes(config, model, on_gpu=on_gpu, micro_batches=1)
    assert counted.number == (0 if on_gpu else 1)


class CountedSoftmax(TorchDispatchMode):
    """Number of log-softmaxes under this mode."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._log_softmax.default
        return func(*args, **(kwargs or {}))
