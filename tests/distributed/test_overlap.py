"""Exchanges that overlap with the backward pass: bit-identical to those without, and started during it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from megatron01.comm.transport import TorchTransport
from megatron01.errors import UserError
from megatron01.integrations import keep_gradients_local
from megatron01.optim import SGDM, BinSGDM, LossScaler, LRSchedule, OneBitAdam, SoftSignSGD, ZeroOneAdam
from tests.distributed.harness import run_ranks
from tests.tiers import slow_after

STEPS = 10
BLOCK = 32


class Model(nn.Module):
    """An embedding tied to the output, and layers between, some of which may be skipped; one parameter is unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.unused = nn.Parameter(torch.ones(7))
        self.embedding = nn.Embedding(23, 20)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))

    def forward(self, tokens: torch.Tensor, skipped: int) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            if number != skipped:
                hidden = hidden + layer(hidden).tanh()
        logits = hidden @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.float().flatten(0, -2), tokens.roll(1, -1).flatten())


SCHEDULE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=2, total_steps=STEPS)
OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "0/1 Adam": (ZeroOneAdam, {"variance_kappa": 1, "max_sync_interval": 2, "sync_policy": "schedule"}),
    "0/1 Adam, clipped": (ZeroOneAdam, {"variance_kappa": 1, "max_sync_interval": 2, "max_grad_norm": 0.1}),
    "0/1 Adam, uncompressed": (ZeroOneAdam, {"variance_kappa": 1, "sync_policy": "every", "compressor": "none"}),
    "1-bit Adam": (OneBitAdam, {"freeze_step": 4}),
    "BinSGDM": (BinSGDM, {"seed": 5}),
    "soft sign": (SoftSignSGD, {}),
    "SGDM": (SGDM, {}),
}


@dataclass
class Run:
    """Records of a replica's run.

    Attributes:
        early: by step, all-to-alls started while the last backward pass ran.
        prints: fingerprints, by step.
        states: by step, all buffers of the state, and the model's weights.
        reports: by step, kind, bytes, rounds and interval.
    """

    early: list[int] = field(default_factory=list)
    prints: list[str] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    reports: list[tuple[str, int, int, int]] = field(default_factory=list)


@contextmanager
def counting_exchanges() -> Iterator[list[int]]:
    """The number of all-to-alls started so far, as the list's one entry: one for each bucket."""
    count = [0]
    original = TorchTransport.all_to_all

    def counted(self: TorchTransport, *given: Any, **settings: Any) -> Any:
        count[0] += 1
        return original(self, *given, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchTransport, "all_to_all", counted)
        yield count


def train(
    rank: int,
    name: str,
    *,
    overlap: bool,
    bucket_elements: int,
    skips: bool = False,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    main_grad: bool = False,
    overflow_at: int = -1,
) -> Run:
    """Replica 1 overflows at ``overflow_at``; with ``skips``, each replica skips other layers."""
    kind, options = OPTIMIZERS[name]
    model = Model().to(dtype)
    if not skips:
        del model.unused  # its bucket, and all after it, would wait for the end of the backward pass
    scaler = LossScaler(initial=256.0, hysteresis=1) if dtype == torch.float16 else None
    optimizer = kind(
        model.named_parameters(),
        SCHEDULE,
        block_size=BLOCK,
        bucket_elements=bucket_elements,
        overlap=overlap,
        loss_scaler=scaler,
        weight_decay=0.1,
        **options,
    )
    if main_grad:
        optimizer.sum_gradients_in_fp32()
    module = optimizer.attach(model)
    run = Run()
    generator = torch.Generator().manual_seed(rank)
    with counting_exchanges() as count:
        for step in range(STEPS):
            optimizer.zero_grad()
            for remaining in reversed(range(micro_batches)):
                tokens = torch.randint(23, (2, 9), generator=generator)
                with optimizer.no_sync() if remaining else nullcontext():
                    loss = optimizer.scale_loss(module(tokens, (2 * step + rank) % 5 if skips else -1) / micro_batches)
                    if rank == 1 and step == overflow_at and not remaining:
                        loss = loss * torch.inf
                    before = count[0]
                    loss.backward()
            run.early.append(count[0] - before)
            optimizer.step()
            report = optimizer.last_step
            run.reports.append((report.kind, report.bytes_sent, report.rounds, report.interval))
            run.prints.append(optimizer.fingerprint())
            tensors = {**optimizer.replicated_state(), **optimizer.replica_state()}
            tensors |= {f"weights of {name}": p.detach() for name, p in model.named_parameters()}
            run.states.append({name: tensor.clone() for name, tensor in tensors.items()})
    return run


def both(rank: int, size: int, variants: list[dict[str, Any]]) -> list[tuple[Run, Run]]:
    """Each variant with overlap, and without."""
    return [tuple(train(rank, overlap=overlap, **variant) for overlap in (True, False)) for variant in variants]


def assert_same_runs(runs: list[tuple[Run, Run]], variant: dict[str, Any]) -> None:
    for early, late in runs:
        assert early.reports == late.reports, variant
        assert early.prints == late.prints == runs[0][0].prints, variant
        for step, (one, other) in enumerate(zip(early.states, late.states, strict=True)):
            for name, tensor in one.items():
                assert torch.equal(tensor, other[name]), f"{variant}: {name} after step {step}"
        assert not any(late.early), variant


MANY, ONE = 6 * BLOCK, 1 << 22  # elements of a bucket


@pytest.fixture(scope="module", params=slow_after(1, OPTIMIZERS))
def runs(request: pytest.FixtureRequest) -> list[tuple[dict[str, Any], list[tuple[Run, Run]]]]:
    """By variant of an optimizer: the runs of each replica."""
    name = request.param
    variants: list[dict[str, Any]] = [{"name": name, "bucket_elements": size} for size in (MANY, ONE)]
    if name in ("0/1 Adam", "1-bit Adam", "BinSGDM", "SGDM"):
        variants += [
            {"name": name, "bucket_elements": MANY, "skips": True, "micro_batches": 2},
            {"name": name, "bucket_elements": MANY, "micro_batches": 2, "main_grad": True, "dtype": torch.bfloat16},
            {"name": name, "bucket_elements": MANY, "dtype": torch.float16, "overflow_at": 1},
            {"name": name, "bucket_elements": MANY, "dtype": torch.float16, "overflow_at": 5},
        ]
    return list(zip(variants, zip(*run_ranks(both, 2, variants), strict=True), strict=True))


def test_overlap_changes_no_bit(runs: Any) -> None:
    for variant, of_replicas in runs:
        assert_same_runs(list(of_replicas), variant)


def test_exchanges_start_before_the_backward_pass_has_ended(runs: Any) -> None:
    """All buckets if every parameter gets a gradient; none if u holds earlier local steps or gradients are clipped."""
    seen = set()
    for variant, of_replicas in runs:
        if variant.get("skips"):
            continue
        for early, _ in of_replicas:
            for (kind, _, _, interval), started in zip(early.reports, early.early, strict=True):
                waits = kind != "full" and (interval > 1 or "clipped" in variant["name"])
                many = variant["bucket_elements"] == MANY and started != 1
                seen.add((kind, many, started > 0))
                assert (started == 0) if waits else (started >= 9 or not many), (variant, kind)
    name = runs[0][0]["name"]
    if name in ("0/1 Adam", "1-bit Adam", "BinSGDM"):
        assert {("one_bit", True, True), ("one_bit", False, True)} <= seen
    if name in ("0/1 Adam", "0/1 Adam, clipped", "SGDM"):
        assert ("full", True, True) in seen


def test_a_step_that_is_called_off_leaves_no_trace(runs: Any) -> None:
    for variant, of_replicas in runs:
        if "overflow_at" not in variant:
            continue
        step = variant["overflow_at"]
        for early, _ in of_replicas:
            assert early.reports[step][0] == "skipped", variant
            for name, tensor in early.states[step].items():
                if name != "scalars":
                    assert torch.equal(tensor, early.states[step - 1][name]), f"{variant}: {name}"


def second_backward(rank: int, size: int, name: str) -> str:
    """The error message for two backward passes before a step; in a local step they are accumulated."""
    kind, options = OPTIMIZERS[name]
    model = Model()
    optimizer = kind(model.named_parameters(), SCHEDULE, block_size=BLOCK, **options)
    module = optimizer.attach(model)
    tokens = torch.arange(18).view(2, 9)
    while not (name == "BinSGDM" or optimizer._plan(optimizer.step_count).averages):
        module(tokens, -1).backward()
        optimizer.step()
        optimizer.zero_grad()
    module(tokens, -1).backward()
    with pytest.raises(UserError, match=r"no_sync\(\)") as caught:
        module(tokens, -1).backward()
    return str(caught.value)


@pytest.mark.parametrize("name", ["0/1 Adam", "BinSGDM"])
def test_a_second_backward_pass_is_refused(name: str) -> None:
    first, second = run_ranks(second_backward, 2, name)
    assert first == second and first.startswith("a second backward pass reached parameter")


def out_of_memory(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError


def leaves_a_batch_out(rank: int, size: int, name: str, overlap: bool, fail: list[int]) -> str:
    """In step 2 the backward pass of the replicas ``fail`` ends early: the error message, or the state at the end."""
    kind, options = OPTIMIZERS[name]
    model = Model()
    options = {**options, "block_size": BLOCK, "bucket_elements": MANY, "overlap": overlap}
    optimizer = kind(model.named_parameters(), SCHEDULE, **options)
    module = optimizer.attach(model)
    tokens = torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(rank))
    for step in range(STEPS):
        loss = module(tokens, -1)
        if step == 2 and rank in fail:
            model.layers[1].bias.register_hook(out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                loss.backward()
            model.layers[1].bias._backward_hooks.clear()
            try:
                optimizer.zero_grad()
            except UserError as error:
                return str(error)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.fingerprint()


@pytest.mark.parametrize("name", ["BinSGDM", "SGDM"])
def test_a_batch_whose_exchange_has_been_started_cannot_be_left_out(name: str) -> None:
    told = run_ranks(leaves_a_batch_out, 2, name, True, [0, 1])
    assert all(message.startswith("zero_grad() was called between a backward pass") for message in told)
    one, other = run_ranks(leaves_a_batch_out, 2, name, False, [1])
    assert one == other
    (alone,) = run_ranks(leaves_a_batch_out, 1, name, True, [0])
    assert alone == run_ranks(leaves_a_batch_out, 1, name, False, [0])[0]


def in_between(rank: int, size: int) -> tuple[list[str], list[tuple[str, torch.Tensor]]]:
    """Between backward pass and step, state is read and later a layer is frozen: error messages, and that layer."""
    kind, options = OPTIMIZERS["BinSGDM"]
    model = Model()
    optimizer = kind(model.named_parameters(), SCHEDULE, block_size=BLOCK, bucket_elements=MANY, **options)
    module = optimizer.attach(model)
    tokens = torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(rank))
    messages, trace = [], []
    for step in range(STEPS):
        module(tokens, -1).backward()
        if step == 2:
            for ask in (optimizer.fingerprint, optimizer.replica_state, optimizer.master_parameters):
                with pytest.raises(UserError) as caught:
                    ask()
                messages.append(str(caught.value))
        if step == 4:
            model.layers[2].requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad()
        trace.append((optimizer.fingerprint(), model.layers[2].weight.detach().clone()))
    return messages, trace


def test_state_and_freezing_between_backward_pass_and_step() -> None:
    (messages, first), (_, second) = run_ranks(in_between, 2)
    assert len(messages) == 3 and all("between a backward pass" in message for message in messages)
    for one, other in zip(first, second, strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])
    assert all(torch.equal(weight, first[4][1]) for _, weight in first[4:])


def two_optimizers(rank: int, size: int) -> list[list[str]]:
    """The state at the end if neither overlaps, if one of them does or both do, and in groups of their own."""
    attached = [(False, False), (True, True), (True, False), (False, True)]
    return [
        *(joint_steps(rank, *which, own_groups=False) for which in attached),
        joint_steps(rank, True, True, own_groups=True),
    ]


def joint_steps(rank: int, *attaches: bool, own_groups: bool) -> list[str]:
    """A layer each, one of which replica 0 leaves out at some steps; the steps are taken in either order."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizers = []
    for layer, attached in zip(layers, attaches, strict=True):
        group = torch.distributed.new_group() if own_groups else None
        optimizer = ZeroOneAdam(layer.named_parameters(), 1e-2, block_size=32, bucket_elements=64, process_group=group)
        optimizers.append(optimizer)
        if attached:
            optimizer.attach(layer)
    for step in range(20):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        left_out = (step + rank) % 4
        for index, layer in enumerate(layers):
            if rank == 1 or index != left_out:
                inputs = inputs + layer(inputs).tanh()
        (inputs - 1).square().mean().backward()
        for optimizer in optimizers if step < 10 else reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()
    return [optimizer.fingerprint() for optimizer in optimizers]


def test_optimizers_of_one_group_do_not_take_each_others_gradients() -> None:
    """Replicas would send buckets of one where others send those of the other, which are as long."""
    first, second = run_ranks(two_optimizers, 2)
    assert first == second and all(state == first[0] for state in first)


def move_to_main_grad(parameter: torch.Tensor) -> None:
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None


def hook_after_attach(rank: int, size: int) -> str:
    model = nn.Linear(3, 2)
    optimizer = ZeroOneAdam(model.named_parameters(), 0.1)
    optimizer.attach(model)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(move_to_main_grad)
    with pytest.raises(UserError) as raised:
        model(torch.ones(1, 3)).sum().backward()
    return str(raised.value)


def test_a_hook_that_collects_gradients_must_come_before_attach() -> None:
    for message in run_ranks(hook_after_attach, 2):
        assert "has a main_grad, and a hook that was registered after optimizer.attach()" in message


def clip(model: nn.Module, module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def accumulate(model: nn.Module, module: nn.Module) -> None:
    module(torch.arange(18).view(2, 9), -1).backward()


def only_read(model: nn.Module, module: nn.Module) -> None:
    nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def written_to(
    rank: int, size: int, name: str, overlap: bool, write: Callable[[nn.Module, nn.Module], None], wrapped: bool
) -> str | None:
    """The error message where gradients are written to after the backward pass."""
    kind, options = OPTIMIZERS[name]
    model = Model()
    del model.unused
    whole = keep_gradients_local(nn.parallel.DistributedDataParallel(model)) if wrapped else model
    options = {**options, "block_size": BLOCK, "bucket_elements": MANY, "overlap": overlap}
    optimizer = kind(model.named_parameters(), SCHEDULE, **options)
    module = optimizer.attach(whole)
    tokens = torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(rank))
    try:
        for _ in range(STEPS):
            module(tokens, -1).backward()
            with optimizer.no_sync():
                write(model, module)
            optimizer.step()
            optimizer.zero_grad()
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", ["0/1 Adam", "BinSGDM", "SGDM"])
def test_gradients_whose_exchange_has_been_started_cannot_be_written_to(name: str) -> None:
    for write, wrapped in ((clip, False), (accumulate, False), (only_read, True)):
        for told in run_ranks(written_to, 2, name, True, write, wrapped):
            assert told is not None and told.startswith("gradients were written to between a backward pass"), write
    for overlap, write, wrapped in ((True, only_read, False), (False, clip, False), (False, only_read, True)):
        assert run_ranks(written_to, 2, name, overlap, write, wrapped) == [None, None], write
