"""ZeroOneAdam on real models: compiled; parameter groups; frozen, tied, empty and scalar parameters; schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron01.errors import UserError
from megatron01.optim import LRSchedule, TabulatedSchedule, ZeroOneAdam
from tests.distributed.harness import run_ranks

STEPS = 60
# full steps at first, then 1-bit and local ones
SCHEDULE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=5, total_steps=STEPS)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 3))


def batch(rank: int, step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(size, 12, generator=generator)
    return inputs, torch.stack([inputs[:, :4].sum(1), inputs[:, 4:8].prod(1), inputs[:, 8:].amax(1)], 1)


def train(
    rank: int,
    optimizer: ZeroOneAdam,
    compute: Callable[[Tensor], Tensor],
    steps: int = STEPS,
    make_batch: Callable[[int, int], tuple[Tensor, Tensor]] = batch,
) -> dict[str, Any]:
    """Losses, kinds of steps, fingerprints, and the replicated weights at the end."""
    trace: dict[str, Any] = {"losses": [], "kinds": [], "rates": [], "intervals": [], "fingerprints": []}
    for step in range(steps):
        inputs, targets = make_batch(rank, step)
        loss = (compute(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last_step is not None
        trace["losses"].append(loss.item())
        trace["kinds"].append(optimizer.last_step.kind)
        trace["rates"].append(optimizer.param_groups[0]["lr"])
        trace["intervals"].append(optimizer.last_step.interval)
        trace["fingerprints"].append(optimizer.fingerprint())
    trace["weights"] = {name: weight.numpy().copy() for name, weight in optimizer.master_parameters().items()}
    return trace


def check(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """Replicas are equal after every step, every kind of step was taken, and the loss fell; returns the first trace."""
    for trace in traces:
        assert trace["fingerprints"] == traces[0]["fingerprints"]
        assert {"full", "one_bit", "local"} == set(trace["kinds"])
        assert np.mean(trace["losses"][-5:]) < 0.8 * np.mean(trace["losses"][:5])
    return traces[0]


def compiled_and_not(rank: int, size: int) -> list[dict[str, Any]]:
    traces = []
    for compile_it in (False, True):
        model = network()
        module: nn.Module = torch.compile(model, backend="aot_eager") if compile_it else model  # type: ignore[assignment]
        optimizer = ZeroOneAdam(module.named_parameters(), SCHEDULE)
        traces.append(train(rank, optimizer, optimizer.attach(module)))
    return traces


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_same_model_does() -> None:
    results = run_ranks(compiled_and_not, 2)
    plain, compiled = (check([traces[i] for traces in results]) for i in range(2))
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-3)


def compiled_step(rank: int, size: int) -> list[list[str]]:
    """Fingerprints of two runs; in the second the whole training step is compiled, optimizer included."""
    found: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        traces.extend(node.meta.get("stack_trace") or "" for node in graph.graph.nodes)
        return graph.forward

    traces: list[str] = []
    for compile_it in (False, True):
        model = network()
        optimizer = ZeroOneAdam(model.named_parameters(), SCHEDULE)

        def step(inputs: Tensor, targets: Tensor) -> None:
            (model(inputs) - targets).square().mean().backward()  # noqa: B023
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023

        run = torch.compile(step, backend=backend) if compile_it else step
        found.append([])
        for number in range(20):
            run(*batch(rank, number))
            found[-1].append(optimizer.fingerprint())
    assert traces and not any("megatron01/optim" in trace for trace in traces), "the optimizer was compiled too"
    return found


@pytest.mark.slow
def test_a_compiled_training_step_is_the_same_step() -> None:
    for plain, compiled in run_ranks(compiled_step, 2):
        assert plain == compiled


def with_weights_written_back(rank: int, size: int) -> list[list[str]]:
    """Fingerprints of two runs; before each step of the second its weights are overwritten with themselves."""
    found = []
    for writes in (False, True):
        model = network()

        def prepare(rank: int, step: int, model: nn.Module = model, writes: bool = writes) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                for parameter in model.parameters() if writes else ():
                    parameter.copy_(parameter.clone())
            return batch(rank, step)

        optimizer = ZeroOneAdam(model.named_parameters(), SCHEDULE, gradient_wire_dtype="4bit")
        found.append(train(rank, optimizer, optimizer.attach(model), make_batch=prepare)["fingerprints"])
    return found


def test_weights_that_are_written_back_make_no_difference_to_gradients_under_way() -> None:
    """The check of such weights comes when quantized gradients have been sent, whose rounding errors lie in u."""
    for plain, written in run_ranks(with_weights_written_back, 2):
        assert plain == written


def by_default_dtype(rank: int, size: int, backend: str, wire: Any, quantizes: bool) -> list[list[str]]:
    """Fingerprints of two runs, the second under another default dtype, which many programs set for a large model."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model, batches = network(), [batch(rank, step) for step in range(20)]
        torch.set_default_dtype(dtype)
        try:
            optimizer = ZeroOneAdam(
                model.named_parameters(),
                0.01,
                backend=backend,
                gradient_wire_dtype=wire,
                compressor="one_bit" if quantizes else "none",
                sync_policy="constant:2",
                variance_freeze_step=4,
            )
            found.append(train(rank, optimizer, model, 20, lambda rank, step: batches[step])["fingerprints"])  # noqa: B023
        finally:
            torch.set_default_dtype(torch.float32)
    return found


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("wire", "quantizes"), [("4bit", True), (None, False)])
def test_the_default_dtype_makes_no_difference(backend: str, wire: Any, quantizes: bool) -> None:
    for plain, other in run_ranks(by_default_dtype, 2, backend, wire, quantizes):
        assert plain == other


def groups_of_their_own(rank: int, size: int) -> list[float]:
    parameters = [nn.Parameter(torch.ones(100)) for _ in range(3)]
    groups = [
        {"params": parameters[:1]},
        {"params": parameters[1:2], "lr_scale": 0.5},
        {"params": parameters[2:], "weight_decay": 0.5},
    ]
    optimizer = ZeroOneAdam(groups, SCHEDULE, block_size=128)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        gradient = torch.randn(100, generator=generator) + 1.0
        for parameter in parameters:
            parameter.grad = gradient.clone()
        optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [
        SCHEDULE.lr(STEPS - 1) * scale for scale in (1.0, 0.5, 1.0)
    ]
    moved = [float((parameter.detach() - 1.0).mean()) for parameter in parameters]
    return [moved[1] / moved[0], moved[2] - moved[0]]


def test_groups_have_rates_and_weight_decay_of_their_own() -> None:
    results = run_ranks(groups_of_their_own, 2)
    assert results[0] == results[1]
    share, decayed = results[0]
    assert share == pytest.approx(0.5, rel=1e-3)  # the same bits at half the scale
    assert -0.5 * sum(SCHEDULE.lr(step) for step in range(STEPS)) < decayed < -0.05


def with_frozen_parts(rank: int, size: int) -> dict[str, Any]:
    model = network()
    model[0].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = ZeroOneAdam(model.named_parameters(), SCHEDULE, weight_decay=0.1)
    trace = train(rank, optimizer, model)
    assert set(trace["weights"]) == {"2.weight", "2.bias", "3.weight", "3.bias"}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("0."), name
    return trace


def test_frozen_parameters_stay_as_they_are() -> None:
    check(run_ranks(with_frozen_parts, 2))


def frozen_parts_of_another_seed(rank: int, size: int) -> list[Any]:
    """The weights of all layers, first as built, and then after other weights have been loaded into them."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(5, 5), nn.Linear(5, 1)).to(memory_format=torch.channels_last)
    model[1].bfloat16()
    model[:2].requires_grad_(False)
    optimizer = ZeroOneAdam(model.named_parameters(), SCHEDULE)
    built = [parameter.detach().float().numpy().copy() for parameter in model.parameters()]
    if rank == 0:
        model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    optimizer.reload_weights()
    return built + [parameter.detach().float().numpy() for parameter in model.parameters()]


def test_frozen_parameters_are_those_of_replica_0_too() -> None:
    for one, *others in zip(*run_ranks(frozen_parts_of_another_seed, 3), strict=True):
        assert all((other == one).all() for other in others)


def frozen_parts_of_another_shape(rank: int, size: int) -> str:
    model = nn.Sequential(nn.Linear(2, 3 + rank), nn.Linear(5, 1))
    model[0].requires_grad_(False)
    with pytest.raises(UserError) as error:
        ZeroOneAdam(model.named_parameters(), SCHEDULE)
    return str(error.value)


def test_other_frozen_parameters_are_refused() -> None:
    for message in run_ranks(frozen_parts_of_another_shape, 2):
        assert message.startswith("replicas [1] have other parameters")


class TiedModel(nn.Module):
    """Two layers and their transposes: an autoencoder with shared weights, wrapped so that the tie has two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(12, 12, bias=False)
        self.decoder = nn.Linear(12, 12, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decoder(self.encoder(inputs).tanh())


def own_inputs(rank: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, _ = batch(rank, step)
    return inputs, inputs


def tied(rank: int, size: int) -> dict[str, Any]:
    model = TiedModel()
    optimizer = ZeroOneAdam(model.named_parameters(), SCHEDULE)
    trace = train(rank, optimizer, model, make_batch=own_inputs)
    assert list(trace["weights"]) == ["encoder.weight"]
    assert model.decoder.weight is model.encoder.weight
    with optimizer.replicated_weights():
        assert torch.equal(model.decoder.weight, torch.from_numpy(trace["weights"]["encoder.weight"]))
    return trace


def test_tied_weights_are_one_parameter() -> None:
    check(run_ranks(tied, 2))


def accumulated(rank: int, size: int) -> list[dict[str, Any]]:
    """Batches of 16: whole, in four micro-batches, and in four micro-batches accumulated in ``main_grad``."""
    traces = []
    for parts, with_main_grad in ((1, False), (4, False), (4, True)):
        model = network()
        # not quantized: a sign that depends on a rounding error would make the runs diverge
        optimizer = ZeroOneAdam(model.named_parameters(), SCHEDULE, compressor="none", max_grad_norm=1.0)
        if with_main_grad:
            for parameter in model.parameters():
                parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
                parameter.register_post_accumulate_grad_hook(move_to_main_grad)
        trace: dict[str, Any] = {"losses": [], "fingerprints": []}
        for step in range(STEPS):
            losses = []
            for inputs, targets in zip(*(whole.chunk(parts) for whole in batch(rank, step)), strict=True):
                loss = (model(inputs) - targets).square().mean() / parts
                with optimizer.no_sync():
                    loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            trace["losses"].append(sum(losses))
            trace["fingerprints"].append(optimizer.fingerprint())
        traces.append(trace)
    return traces


def move_to_main_grad(parameter: Tensor) -> None:
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None


def test_gradients_of_parts_add_up_to_those_of_the_whole() -> None:
    results = run_ranks(accumulated, 2)
    for rank in range(2):
        whole, *others = results[rank]
        for other, other_rank in zip(others, results[1 - rank][1:], strict=True):
            assert other["losses"] == pytest.approx(whole["losses"], rel=1e-3)
            assert other["fingerprints"] == other_rank["fingerprints"]


def main_grad_of_bf16(rank: int, size: int) -> tuple[float, float]:
    """The gradient of a step after accumulating 256 and 64 times 1, in fp32 and in bf16: 320 or 256."""
    norms = []
    for with_main_grad in (True, False):
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        if with_main_grad:
            parameter.main_grad = torch.zeros(1)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(move_to_main_grad)
        optimizer = ZeroOneAdam([parameter], 0.1, gradient_wire_dtype=torch.float32)
        for value in [256.0] + [1.0] * 64:
            (value * parameter).sum().backward()
        optimizer.step()
        assert optimizer.last_step is not None
        norms.append(optimizer.last_step.grad_norm)
        optimizer.zero_grad()
        assert not with_main_grad or float(parameter.main_grad) == 0.0  # type: ignore[attr-defined]
    return norms[0], norms[1]


def test_main_grad_keeps_what_bf16_loses() -> None:
    assert run_ranks(main_grad_of_bf16, 2) == [(320.0, 256.0)] * 2


def some_gradients_in_fp32(rank: int, size: int) -> list[list[str]]:
    """Fingerprints with and without ``attach`` of a bf16 model in which two weights' gradients are fp32."""
    found = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(12, 12) for _ in range(6)]).bfloat16()
        for layer in (0, 2):
            model[layer].weight.grad_dtype = torch.float32  # type: ignore[union-attr]
        optimizer = ZeroOneAdam(model.named_parameters(), SCHEDULE, bucket_elements=64, block_size=32)
        module = optimizer.attach(model) if attached else model
        found.append([])
        for step in range(20):
            inputs = batch(rank, step)[0].bfloat16()
            (module(inputs) - inputs).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found[-1].append(optimizer.fingerprint())
    return found


def test_gradients_that_are_no_views_are_not_taken_again_once_they_are_sent() -> None:
    (plain, attached), other = run_ranks(some_gradients_in_fp32, 2)
    assert [plain, attached] == other and plain == attached


def never_used(rank: int, size: int) -> dict[str, Any]:
    model = network()
    unused = nn.Linear(33, 7)
    start = {name: p.detach().clone() for name, p in unused.named_parameters()}
    model.add_module("unused", unused)
    used = model[:4]
    optimizer = ZeroOneAdam(model.named_parameters(), SCHEDULE, block_size=64)
    trace = train(rank, optimizer, used)
    for name, parameter in unused.named_parameters():
        expected = start[name] if rank == 0 else torch.from_numpy(trace["weights"][f"unused.{name}"])
        assert torch.equal(parameter, expected)
    return trace


def test_parameters_that_never_get_a_gradient_do_not_move() -> None:
    check(run_ranks(never_used, 2))


class Odd(nn.Module):
    """Parameters without elements and without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * self.network(inputs) + self.empty.sum() + self.nothing.sum()


def odd_parameters(rank: int, size: int, order: list[str]) -> tuple[dict[str, Any], list[str]]:
    model = Odd()
    named = dict(model.named_parameters())
    names = order + [name for name in named if name not in order]
    optimizer = ZeroOneAdam([(name, named[name]) for name in names], SCHEDULE, weight_decay=0.01)
    trace = train(rank, optimizer, model, steps=STEPS - 7)
    assert trace["weights"]["scale"].shape == () and trace["weights"]["empty"].shape == (0, 5)
    assert trace["weights"]["scale"] != 0.5

    other = Odd()
    named = dict(other.named_parameters())
    resumed = ZeroOneAdam([(name, named[name]) for name in names], SCHEDULE, weight_decay=0.01)
    resumed.load_state_dict(optimizer.state_dict())
    inputs, targets = batch(rank, STEPS)
    for each, module in ((optimizer, model), (resumed, other)):
        (module(inputs) - targets).square().mean().backward()
        each.step()
    return trace, [optimizer.fingerprint(), resumed.fingerprint()]


@pytest.mark.parametrize(
    "order", [["empty", "scale"], ["scale"], []], ids=["empty first", "scalar first", "as they are"]
)
def test_empty_and_scalar_parameters(order: list[str]) -> None:
    results = run_ranks(odd_parameters, 2, order)
    check([trace for trace, _ in results])
    assert len({print_ for _, prints in results for print_ in prints}) == 1


def images(rank: int, step: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
    return inputs, inputs.mean((2, 3))


def in_memory_formats(rank: int, size: int, compressor: str) -> list[dict[str, Any]]:
    traces = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 10, 3), nn.ReLU(), nn.Conv2d(10, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ).to(memory_format=memory_format)
        optimizer = ZeroOneAdam(model.named_parameters(), SCHEDULE, compressor=compressor)  # type: ignore[arg-type]
        trace = train(rank, optimizer, model, make_batch=images)
        assert trace["weights"]["0.weight"].shape == (10, 3, 3, 3)
        with optimizer.replicated_weights():
            assert np.array_equal(model[0].weight.detach().numpy(), trace["weights"]["0.weight"])
        traces.append(trace)
    return traces


def test_channels_last_weights_train_as_contiguous_ones_do() -> None:
    results = run_ranks(in_memory_formats, 2, "none")
    plain, channels_last = (check([traces[i] for traces in results]) for i in range(2))
    assert channels_last["losses"] == pytest.approx(plain["losses"], rel=1e-2, abs=1e-4)
    for name, weight in plain["weights"].items():
        np.testing.assert_allclose(channels_last["weights"][name], weight, atol=1e-3)


def test_channels_last_weights_train_with_one_bit() -> None:
    results = run_ranks(in_memory_formats, 2, "one_bit")
    for i in range(2):
        check([traces[i] for traces in results])


def torch_schedules() -> dict[str, TabulatedSchedule]:
    schedulers = torch.optim.lr_scheduler

    def warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> schedulers.LRScheduler:
        warm_up = schedulers.LinearLR(optimizer, 0.1, total_iters=8)
        return schedulers.SequentialLR(
            optimizer, [warm_up, schedulers.CosineAnnealingLR(optimizer, STEPS - 8)], milestones=[8]
        )

    makers: dict[str, Callable[[torch.optim.Optimizer], schedulers.LRScheduler]] = {
        "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS),
        "warm-up and cosine": warm_up_then_cosine,
        "steps": lambda optimizer: schedulers.MultiStepLR(optimizer, [20, 30, 40], gamma=0.5),
        "restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, STEPS // 3),
    }
    return {
        name: TabulatedSchedule.from_torch(maker, base_lr=0.02, total_steps=STEPS) for name, maker in makers.items()
    }


def with_torch_schedules(rank: int, size: int) -> dict[str, dict[str, Any]]:
    traces = {}
    for name, schedule in torch_schedules().items():
        model = network()
        optimizer = ZeroOneAdam(model.named_parameters(), schedule, sync_policy="schedule")
        traces[name] = train(rank, optimizer, model)
    return traces


def test_torch_schedulers_drive_rates_and_intervals() -> None:
    results = run_ranks(with_torch_schedules, 2)
    intervals = {}
    for name, schedule in torch_schedules().items():
        trace = check([traces[name] for traces in results])
        assert trace["rates"] == list(schedule.learning_rates), name
        for step, (rate, interval) in enumerate(zip(trace["rates"], trace["intervals"], strict=True)):
            assert interval == 1 if step < schedule.warmup_steps else interval * rate <= schedule.peak_lr
        intervals[name] = trace["intervals"]
    assert intervals["steps"] == [1] * 20 + [2] * 10 + [4] * 10 + [8] * 20
    assert intervals["one cycle"][STEPS - 1] == 16
    assert intervals["restarts"][STEPS // 3 - 1] == 16 and intervals["restarts"][STEPS // 3] == 1
