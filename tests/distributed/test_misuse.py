"""Misuse that would silently train something else ends in a one-line error, on two replicas."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from megatron01.comm import Topology
from megatron01.errors import UserError
from megatron01.optim import SGDM, Adam, LossScaler, LRSchedule, OneBitAdam, ZeroOneAdam, safety
from tests.distributed.harness import run_ranks

STEPS = 24
SCHEDULE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=2, total_steps=STEPS)
OPTIONS: dict[str, Any] = {"block_size": 32, "variance_kappa": 2, "sync_policy": "schedule"}


def new_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))


def backward(model: torch.nn.Module, step: int, rank: int, scale: Any = lambda loss: loss) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(8, 16, generator=generator)
    scale((model(inputs) - inputs.sum(-1, keepdim=True)).square().mean()).backward()


def train(model: torch.nn.Module, optimizer: Any, rank: int, first: int = 0, last: int = STEPS) -> None:
    for step in range(first, last):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()


class Messages(logging.Handler):
    """The package's log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("megatron01").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def error_of(function: Any, *arguments: Any) -> str:
    """The message of the UserError that a call raises; empty if it raises none."""
    try:
        function(*arguments)
    except UserError as error:
        return str(error)
    return ""


# Processes that are not connected, or not in the group.


def outside_of_the_group(rank: int, size: int) -> str:
    group = torch.distributed.new_group([0])
    return error_of(lambda: ZeroOneAdam(new_model().parameters(), SCHEDULE, process_group=group))


def test_a_process_outside_of_the_group_is_refused() -> None:
    inside, outside = run_ranks(outside_of_the_group, 2)
    assert inside == "" and "rank 1" in outside


def sharded_weights(rank: int, size: int, wrap: str) -> str:
    model: torch.nn.Module = new_model()
    if wrap == "fully_shard":
        torch.distributed.fsdp.fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, use_orig_params=wrap == "orig_params", device_id=torch.device("cpu"))
    return error_of(lambda: ZeroOneAdam(model.named_parameters(), SCHEDULE))


@pytest.mark.parametrize("wrap", ["fully_shard", "orig_params", "flat"])
def test_a_model_that_is_sharded_over_processes_is_refused(wrap: str) -> None:
    assert all("is sharded over processes" in message for message in run_ranks(sharded_weights, 2, wrap))


def without_a_group(rank: int, size: int) -> list[str]:
    kinds = (ZeroOneAdam, OneBitAdam, SGDM, Adam)
    found = [error_of(lambda kind=kind: kind(new_model().parameters(), SCHEDULE)) for kind in kinds]
    ZeroOneAdam(new_model().parameters(), SCHEDULE, process_group=Topology.flat())  # where that is intended
    return found


def test_several_processes_without_a_group_are_refused() -> None:
    for found in run_ranks(without_a_group, 2, default_group=False):
        assert all("torchrun started 2 processes" in text and "init_process_group()" in text for text in found)


# DistributedDataParallel.


def wrapped(rank: int, size: int, how: str) -> tuple[str, int]:
    model = new_model()
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, **OPTIONS)
    module = DistributedDataParallel(model)
    if how == "attached":
        return error_of(optimizer.attach, module), 0
    if how == "local":
        safety.keep_gradients_local(module)
    message, sent = "", 0
    try:
        for step in range(STEPS):
            backward(module, step, rank)
            if step == 0:
                own = model[0].weight.grad.clone()
                model.zero_grad()
                backward(model, step, rank)
                assert torch.equal(own, model[0].weight.grad) == (how == "local")
            optimizer.step()
            optimizer.zero_grad()
            sent += optimizer.last_step.bytes_sent
    except UserError as error:
        message = str(error)
    return message, sent


@pytest.mark.parametrize("how", ["by hand", "attached"])
def test_a_wrapped_model_is_refused(how: str) -> None:
    for message, sent in run_ranks(wrapped, 2, how):
        assert "DistributedDataParallel" in message and "keep_gradients_local" in message and sent == 0


def plain_adam(rank: int, size: int, dtype: torch.dtype) -> tuple[list[str], list[float]]:
    """What is told where gradients are not averaged, or learning rates differ; weights where all is well."""
    told = []
    for how in ("not attached", "unwrapped", "no_sync"):
        model = new_model()
        optimizer = Adam(model.named_parameters(), 0.01)
        module = model if how == "not attached" else optimizer.attach(model)
        with optimizer.no_sync():
            backward(model if how == "unwrapped" else module, 0, rank)
        told.append(error_of(optimizer.step))
    told.append(error_of(Adam(model.named_parameters(), 0.01 * (1 + rank)).attach, model))
    weights = []
    for wraps in (False, True):
        torch.manual_seed(rank)
        layer = torch.nn.Linear(16, 1).to(dtype)
        ours = DistributedDataParallel(layer) if wraps else layer  # a module of the user's that averages
        optimizer = Adam(layer.parameters(), 0.01)
        module = ours if wraps else optimizer.attach(layer)
        for _ in range(3):
            module(torch.full((1, 16), 1.0 + rank, dtype=dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.nn.utils.parameters_to_vector(layer.parameters()).tolist())
    assert weights[0] == weights[1]
    return told, weights[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_of_plain_adam_do_not_train_apart(dtype: torch.dtype) -> None:
    (told, weights), other = run_ranks(plain_adam, 2, dtype)
    assert other == (told, weights)
    assert all(text.startswith("the gradients were not averaged over the 2 replicas") for text in told[:3])
    assert told[3].startswith("replicas [1] have other parameters") and "another schedule" in told[3]


def bare(rank: int, size: int) -> tuple[str, int]:
    model, sent = new_model(), 0
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, **OPTIONS)
    for step in range(STEPS):
        train(model, optimizer, rank, step, step + 1)
        sent += optimizer.last_step.bytes_sent
    return "", sent


def test_a_wrapped_model_that_keeps_its_gradients_sends_what_a_bare_one_sends() -> None:
    assert run_ranks(wrapped, 2, "local") == run_ranks(bare, 2)


def two_kinds(rank: int, size: int, batches: int) -> tuple[list[list[float]], int, str]:
    """Weights that torch's AdamW trains beside ZeroOneAdam, bytes of the latter, and its fingerprint."""
    model, sent = new_model(), 0
    ours = ZeroOneAdam(model[0].parameters(), SCHEDULE, **OPTIONS)
    other = torch.optim.AdamW(model[2].parameters(), 0.01)
    module = safety.keep_gradients_local(DistributedDataParallel(model))
    for step in range(STEPS):
        for batch in range(batches):
            with module.no_sync() if batch + 1 < batches else nullcontext():
                backward(module, step + 100 * batch, rank)
        own = model[0].weight.grad.clone()
        torch.distributed.broadcast(own, 0)
        assert torch.equal(own, model[0].weight.grad) == (rank == 0)
        for optimizer in (ours, other):
            optimizer.step()
            optimizer.zero_grad()
        sent += ours.last_step.bytes_sent
    return [parameter.tolist() for parameter in model[2].parameters()], sent, ours.fingerprint()


@pytest.mark.parametrize("batches", [1, 2])
def test_parameters_of_another_optimizer_are_averaged_where_those_of_this_one_stay_local(batches: int) -> None:
    (weights, sent, fingerprint), other = run_ranks(two_kinds, 2, batches)
    assert other == (weights, sent, fingerprint)
    assert sent == run_ranks(first_layer_alone, 2)[0]


def first_layer_alone(rank: int, size: int) -> int:
    model, sent = new_model(), 0
    optimizer = ZeroOneAdam(model[0].parameters(), SCHEDULE, **OPTIONS)
    for step in range(STEPS):
        train(model, optimizer, rank, step, step + 1)
        sent += optimizer.last_step.bytes_sent
    return sent


def joins(rank: int, size: int, batches: tuple[int, int], folder: Path) -> str:
    model = new_model()
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, **OPTIONS)
    module = safety.keep_gradients_local(DistributedDataParallel(model))
    try:
        with module.join():
            train(module, optimizer, rank, 0, batches[rank])
    except (UserError, RuntimeError) as error:
        (folder / str(rank)).write_text(" ".join([str(error), *getattr(error, "__notes__", [])]))
        raise
    return optimizer.fingerprint()


def test_a_replica_that_joins_with_fewer_batches_is_no_hang(tmp_path: Path) -> None:
    run_ranks(joins, 2, (9, 5), tmp_path, may_die=[0, 1])
    going_on, ended = ((tmp_path / rank).read_text() for rank in "01")
    assert "each must call step() as often as the others" in going_on
    assert ended.startswith("this replica has no batch left and others have")
    one, other = run_ranks(joins, 2, (9, 9), tmp_path)
    assert one == other


# An optimizer that replaces another, as for a second phase of training.


def replaced(rank: int, size: int, was_attached: bool) -> tuple[str, int]:
    model = new_model()
    if was_attached:
        before = ZeroOneAdam(model.parameters(), SCHEDULE, **OPTIONS)
        before.attach(model)
    optimizer, sent = ZeroOneAdam(model.parameters(), SCHEDULE, **OPTIONS), 0
    optimizer.attach(model)
    for step in range(STEPS):
        train(model, optimizer, rank, step, step + 1)
        assert optimizer.last_step is not None
        sent += optimizer.last_step.bytes_sent
    return optimizer.fingerprint(), sent


def test_an_optimizer_that_was_replaced_exchanges_nothing_more() -> None:
    assert run_ranks(replaced, 2, True) == run_ranks(replaced, 2, False)


def in_turn(rank: int, size: int, shared: bool) -> list[tuple[int, int]]:
    """Bytes and rounds of the steps of two optimizers; the second is built between two steps of the first."""
    topology, found, pairs = Topology.flat(), [], []
    for count in (1, 2, 2):
        for _ in range(count - len(pairs)):
            model, group = new_model(), topology if shared else Topology.flat()
            pairs.append((model, ZeroOneAdam(model.parameters(), SCHEDULE, process_group=group, **OPTIONS)))
        for model, optimizer in pairs:
            train(model, optimizer, rank, 0, 1)
            assert optimizer.last_step is not None
            found.append((optimizer.last_step.bytes_sent, optimizer.last_step.rounds))
    return found


def test_optimizers_that_share_a_topology_report_what_they_send_alone() -> None:
    expected = run_ranks(in_turn, 2, False)
    assert run_ranks(in_turn, 2, True) == expected
    assert all(num_bytes > 0 and rounds == 1 for num_bytes, rounds in expected[0])


# Learning rates, clipping and loss scales from outside.


def outside_scheduler(rank: int, size: int) -> tuple[str, str]:
    def run(make: Any) -> None:
        model = new_model()
        optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, **OPTIONS)
        scheduler = make(optimizer)
        for step in range(4):
            train(model, optimizer, rank, step, step + 1)
            scheduler.step()

    lambda_lr = torch.optim.lr_scheduler.LambdaLR
    first = error_of(run, lambda optimizer: lambda_lr(optimizer, lambda step: 0.5))
    return first, error_of(run, lambda optimizer: lambda_lr(optimizer, lambda step: 1.0 - 0.1 * step))


def test_an_outside_scheduler_is_refused() -> None:
    for messages in run_ranks(outside_scheduler, 2):
        assert all("from outside" in message and "from_torch" in message for message in messages)


def outside_clipping(rank: int, size: int) -> list[str]:
    model, messages = new_model(), Messages()
    optimizer = OneBitAdam(model.parameters(), SCHEDULE, block_size=32, freeze_step=2)
    for step in range(STEPS):
        backward(model, step, rank)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return messages.texts


def test_outside_clipping_is_noticed_once() -> None:
    for texts in run_ranks(outside_clipping, 2):
        assert sum("max_grad_norm" in text for text in texts) == 1


def clips_later(rank: int, size: int, alone: bool, last: int) -> tuple[bool, list[str]]:
    """Goes on with clipping on two replicas after ``last`` steps without it, on one replica or on two."""
    group = [torch.distributed.new_group([one]) for one in range(size)][rank] if alone else None
    model = new_model()
    before = ZeroOneAdam(model.parameters(), SCHEDULE, process_group=group, variance_freeze_step=8, **OPTIONS)
    train(model, before, 0 if alone else rank, last=last)
    after = ZeroOneAdam(model.parameters(), SCHEDULE, max_grad_norm=1.0, variance_freeze_step=8, **OPTIONS)
    log = Messages()
    after.load_state_dict(before.portable_state_dict())
    train(model, after, rank, first=last, last=last + 2)
    return after.last_step.grad_norm_estimated, log.texts


@pytest.mark.parametrize(("alone", "last", "knows"), [(True, 12, False), (True, 6, True), (False, 12, True)])
def test_clipping_by_rank_local_norms_after_a_resume_is_told(alone: bool, last: int, knows: bool) -> None:
    (estimated, texts), (_, others) = run_ranks(clips_later, 2, alone, last)
    assert estimated == knows and others == []
    assert [("up to 1.41 times" in text and "max_grad_norm" in text) for text in texts] == [True] * (not knows)


def amp_scaled(rank: int, size: int, unscales: bool) -> tuple[list[str], list[str], list[float], str]:
    """Replica 1 overflows at steps 3 and 14; kinds, fingerprints at times, and scales."""
    model = new_model()
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10000)
    kinds, prints = [], []
    for step in range(STEPS):
        backward(model, step, rank, scaler.scale)
        if rank == 1 and step in (3, 14):
            model[0].weight.grad[0, 0] = float("inf")
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        kinds.append(optimizer.last_step.kind)
        prints.append(optimizer.fingerprint())
    scales = [scaler.get_scale()]
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, loss_scaler=LossScaler(), **OPTIONS)
    backward(model, 0, rank, scaler.scale)
    return kinds, prints, scales, error_of(scaler.step, optimizer)


@pytest.mark.parametrize("unscales", [False, True])
def test_grad_scaler_takes_part(unscales: bool) -> None:
    one, other = run_ranks(amp_scaled, 2, unscales)
    assert one[1] == other[1]
    assert one[0][3] == other[0][3] == "skipped" and other[0][14] == "skipped"
    assert one[2] == [1024.0] and other[2] == [256.0]  # each replica has its own
    assert "GradScaler" in one[3]


def scaled_as_unscaled(rank: int, size: int, scale: float) -> str:
    model = new_model()
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    for step in range(STEPS):
        backward(model, step, rank, scaler.scale)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return optimizer.fingerprint()


def test_the_scale_of_grad_scaler_is_taken_out_of_gradients() -> None:
    assert run_ranks(scaled_as_unscaled, 2, 1.0) == run_ranks(scaled_as_unscaled, 2, 4096.0)


# The same data on all replicas.


def data_of_rank(rank: int, size: int, same: bool, dtype: torch.dtype) -> list[str]:
    messages, model = Messages(), new_model().to(dtype)
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, **OPTIONS)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step if same else 100 * step + rank)
        inputs = torch.randn(64, 16, generator=generator).to(dtype)
        (model(inputs) - inputs.sum(-1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [text for text in messages.texts if "same data" in text]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_that_read_the_same_data_are_noticed_once(dtype: torch.dtype) -> None:
    first, second = run_ranks(data_of_rank, 2, True, dtype)
    assert len(first) == 1 and "DistributedSampler" in first[0] and not second
    assert run_ranks(data_of_rank, 2, False, dtype) == [[], []]


# State loaded into another replica, run or optimizer.


def saved(optimizer: Any) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict() if not isinstance(optimizer, dict) else optimizer, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def exchanged_states(rank: int, size: int) -> dict[str, str]:
    model = new_model()
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, **OPTIONS)
    train(model, optimizer, rank)
    state: dict[str, Any] = saved(optimizer)
    everybody: list[Any] = [None] * size
    torch.distributed.all_gather_object(everybody, state)
    other = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))
    small = torch.nn.Sequential(torch.nn.Linear(16, 32))
    alone = {**state, "owner": {**state["owner"], "world_size": 4}}
    return {
        "of the other": error_of(optimizer.load_state_dict, everybody[1 - rank]),
        "own": error_of(optimizer.load_state_dict, everybody[rank]),
        "of more": error_of(optimizer.load_state_dict, alone),
        "class": error_of(OneBitAdam(new_model().parameters(), SCHEDULE, block_size=32).load_state_dict, state),
        "shapes": error_of(ZeroOneAdam(other.parameters(), SCHEDULE, **OPTIONS).load_state_dict, state),
        "fewer": error_of(ZeroOneAdam(small.parameters(), SCHEDULE, **OPTIONS).load_state_dict, state),
        "torch's": error_of(optimizer.load_state_dict, {"state": {}, "param_groups": []}),
    }


def test_state_that_does_not_fit_is_refused_by_name() -> None:
    for rank, messages in enumerate(run_ranks(exchanged_states, 2)):
        assert messages["own"] == ""
        assert f"replica {1 - rank} of 2, and this is replica {rank} of 2" in messages["of the other"]
        assert "of 4, and this is" in messages["of more"] and "portable_state_dict()" in messages["of more"]
        assert "one of ZeroOneAdam; expected one of OneBitAdam" in messages["class"]
        assert "parameter 0 has shape [32, 16] in the state and [16, 32]" in messages["shapes"]
        assert "of 4 parameters and the model has 2" in messages["fewer"]
        assert "lacks" in messages["torch's"]


def portable_states(rank: int, size: int) -> tuple[str, bytes, str]:
    model = new_model()
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, **OPTIONS)
    train(model, optimizer, rank, 0, 19)
    assert not optimizer.last_step.synchronized
    before = optimizer.fingerprint()
    state = optimizer.portable_state_dict()
    assert optimizer.fingerprint() == before
    file = io.BytesIO()
    torch.save(state, file)
    again = new_model()
    other = ZeroOneAdam(again.parameters(), SCHEDULE, **OPTIONS)
    other.load_state_dict(saved(state))
    train(again, other, rank, 19)
    return str([t.sum().item() for t in state["portable"]["average"].values()]), file.getvalue(), other.fingerprint()


def loads_elsewhere(rank: int, size: int, file: bytes) -> tuple[int, str]:
    model = new_model()
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, **OPTIONS)
    optimizer.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
    train(model, optimizer, rank, optimizer.step_count)
    return optimizer.step_count, optimizer.fingerprint()


def test_a_portable_state_loads_on_any_number_of_replicas() -> None:
    one, other = run_ranks(portable_states, 2)
    assert one == other
    for size in (1, 3):
        found = run_ranks(loads_elsewhere, size, one[1])
        assert found == [(STEPS, found[0][1])] * size


QUANTIZED: dict[str, Any] = {**OPTIONS, "gradient_wire_dtype": "4bit"}


def saves_both_ways(rank: int, size: int, folder: Path) -> None:
    model = new_model()
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, **QUANTIZED)
    train(model, optimizer, rank, 0, 19)
    state = optimizer.portable_state_dict()
    dcp.save({"optimizer": state}, checkpoint_id=folder / "sharded")
    if rank == 0:
        torch.save(state, folder / "whole.pt")


def loads_both_ways(rank: int, size: int, folder: Path) -> tuple[str, str]:
    ends = []
    for kind in ("whole", "sharded"):
        model = new_model()
        optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, **QUANTIZED)
        if kind == "whole":
            state = torch.load(folder / "whole.pt", weights_only=True)
        else:
            state = optimizer.portable_state_dict()
            dcp.load({"optimizer": state}, checkpoint_id=folder / "sharded")
        optimizer.load_state_dict(state)
        train(model, optimizer, rank, optimizer.step_count)
        ends.append(optimizer.fingerprint())
    return ends[0], ends[1]


@pytest.mark.parametrize(("saved", "resumed"), [(2, 1), (1, 2), (2, 3)])
def test_torchs_distributed_checkpoint_resizes_a_portable_state(saved: int, resumed: int, tmp_path: Path) -> None:
    run_ranks(saves_both_ways, saved, tmp_path)
    for whole, sharded in run_ranks(loads_both_ways, resumed, tmp_path):
        assert sharded == whole


def loads_into_used(rank: int, size: int) -> tuple[bool, bool]:
    alone = ZeroOneAdam(new_model().parameters(), SCHEDULE, process_group=Topology.flat(), **QUANTIZED)
    state = alone.portable_state_dict()
    state["portable"]["errors"] = {}  # as states of one replica were once, and as load_state() reads them
    model = new_model()
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, **QUANTIZED)
    train(model, optimizer, rank, 0, 19)

    def has_errors() -> bool:
        return any(optimizer.replica_state()[name].any() for name in optimizer.error_places())

    before = has_errors()
    optimizer.load_state_dict(state)
    return before, has_errors()


def test_a_portable_state_without_errors_clears_those_of_the_steps_before() -> None:
    assert run_ranks(loads_into_used, 2) == [(True, False)] * 2


def changes_delay(rank: int, size: int, delay: bool) -> bool:
    model, again = new_model(), new_model()
    options = {**OPTIONS, "sync_policy": "every"}
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, delay=delay, **options)
    train(model, optimizer, rank, 0, 9)
    other = ZeroOneAdam(again.parameters(), SCHEDULE, delay=not delay, **options)
    other.load_state_dict(optimizer.portable_state_dict())
    same = torch.equal(optimizer.replicated_state()["x"], other.replicated_state()["x"])
    train(again, other, rank, 9)
    return same and other.step_count == STEPS


@pytest.mark.parametrize("delay", [False, True])
def test_a_portable_state_loads_with_and_without_delay(delay: bool) -> None:
    assert run_ranks(changes_delay, 2, delay) == [True, True]


def saves_alone(rank: int, size: int) -> str:
    safety.SETTLE_SECONDS = 0.5
    model = new_model()
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, delay=True, **OPTIONS)
    train(model, optimizer, rank, 0, 9)
    assert optimizer.is_pending
    message = error_of(optimizer.state_dict) if rank == 0 else ""
    torch.distributed.barrier()
    train(model, optimizer, rank, 9)  # nothing is lost
    optimizer.state_dict()
    return message + optimizer.fingerprint()


def test_a_delayed_state_of_one_replica_alone_is_refused() -> None:
    one, other = run_ranks(saves_alone, 2)
    assert one.startswith("state_dict() was called on 1 of 2 replicas") and one.endswith(other)


def evaluates_alone(rank: int, size: int) -> tuple[str, list[str]]:
    safety.SETTLE_SECONDS, messages = 0.5, Messages()
    model = new_model()
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, delay=True, **OPTIONS)
    train(model, optimizer, rank, 0, 9)
    assert optimizer.is_pending
    if rank == 0:
        with optimizer.replicated_weights():
            pass
    else:
        time.sleep(1.0)
    train(model, optimizer, rank, 9)  # whose first step ends the exchange on the other replica
    with optimizer.replicated_weights():
        time.sleep(0.6)
    return optimizer.fingerprint(), messages.texts


def test_one_replica_alone_that_waits_for_the_end_of_a_delayed_exchange_says_so() -> None:
    (one, messages), (other, none) = run_ranks(evaluates_alone, 2)
    assert one == other and none == []
    assert len(messages) == 1 and "other replicas have not come to its end for 0.5 seconds" in messages[0]


def skips_a_step(rank: int, size: int) -> list[str]:
    group = torch.distributed.new_group(timeout=timedelta(seconds=3))
    model = new_model()
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, process_group=group, **OPTIONS)
    try:
        for step in range(STEPS):
            if (rank, step) != (1, 5):
                train(model, optimizer, rank, step, step + 1)
            if step == 9:
                torch.distributed.barrier(group)
    except RuntimeError as error:
        return getattr(error, "__notes__", [])
    return []


def test_the_error_of_a_replica_that_waits_for_one_that_has_skipped_a_step_says_so() -> None:
    notes = run_ranks(skips_a_step, 2)
    assert "each must call step() as often as the others" in notes[0][0]


def test_weights_that_were_moved_follow_a_loaded_state() -> None:
    model, other = new_model(), new_model()
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, **OPTIONS)
    train(model, optimizer, 0, 0, 5)
    again = ZeroOneAdam(other.parameters(), SCHEDULE, **OPTIONS)
    for parameter in other.parameters():
        parameter.data = parameter.data.clone()
    again.load_state_dict(saved(optimizer))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_copies_and_pickles_say_why_not() -> None:
    optimizer = ZeroOneAdam(new_model().parameters(), SCHEDULE)
    for make in (copy.deepcopy, copy.copy, pickle.dumps):
        assert "state_dict()" in error_of(make, optimizer)


# Replicas that diverge from each other.


def come_apart(rank: int, size: int, how: str) -> tuple[str, int]:
    model = new_model()
    optimizer = ZeroOneAdam(model.parameters(), SCHEDULE, block_size=32, variance_freeze_step=STEPS)
    train(model, optimizer, rank, 0, 3)
    if rank == 1 and how == "frozen":
        model[2].bias.requires_grad_(False)
    elif rank == 1 and how == "decay":
        optimizer.param_groups[0]["weight_decay"] = 0.5
    elif rank == 1:
        optimizer._local.x[0] += 1e-3
    message = error_of(train, model, optimizer, rank, 3)
    return message, optimizer.step_count


@pytest.mark.parametrize(
    ("how", "words"), [("frozen", "requires_grad"), ("decay", "weight_decay"), ("weights", "other weights")]
)
def test_replicas_that_come_apart_are_noticed_at_a_full_step(how: str, words: str) -> None:
    for message, steps in run_ranks(come_apart, 2, how):
        assert message.startswith("replicas [1]") and words in message and steps <= 10


# Runs in which compression sends no fewer bytes.


def one_bit_runs(rank: int, size: int) -> list[list[str]]:
    found = []
    for options in ({"freeze_step": STEPS}, {"freeze_ratio": 1.0}, {"freeze_step": 4}):
        messages, model = Messages(), new_model()
        train(model, OneBitAdam(model.parameters(), SCHEDULE, block_size=32, **options), rank)
        found.append([text for text in messages.texts if "1-bit Adam" in text])
    return found


def test_one_bit_adam_that_never_freezes_warns_once() -> None:
    first, second = run_ranks(one_bit_runs, 2)
    assert [len(texts) for texts in first] == [1, 1, 0] and not any(second)
    assert "freeze_step is 24, and the run has 24 steps" in first[0][0] and "at step 12" in first[1][0]


def sends_more(rank: int, size: int) -> list[str]:
    messages, model = Messages(), new_model()
    # each refresh comes right after a local step, so that it sends gradients and what has been accumulated
    options = {"compressor": "none", "sync_policy": "every", "variance_freeze_step": 1}
    train(model, ZeroOneAdam(model.parameters(), SCHEDULE, block_size=1024, **options), rank)
    return messages.texts


def test_a_run_that_sent_more_than_adam_says_so() -> None:
    first, second = run_ranks(sends_more, 2)
    assert len(first) == 1 and "times the" in first[0] and not second
