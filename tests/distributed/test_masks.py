"""Elements that never move: explicit masks, rows that get no gradient, and parameters frozen in the middle of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron01.config import BertModelConfig
from megatron01.errors import UserError
from megatron01.models.bert import Bert
from megatron01.optim import (
    SGDM,
    BinSGDM,
    LRSchedule,
    OneBitAdam,
    SoftSignSGD,
    ZeroOneAdam,
    weight_decay_groups,
)
from tests.distributed.harness import run_ranks
from tests.distributed.test_overlap import counting_exchanges
from tests.tiers import slow_after

STEPS = 40
SCHEDULE = LRSchedule(style="cosine", peak_lr=0.01, warmup_steps=6, total_steps=STEPS)
FAMILY: dict[str, tuple[type, dict[str, Any]]] = {
    "0/1 Adam": (ZeroOneAdam, {"variance_kappa": 2}),
    "0/1 Adam, delayed": (ZeroOneAdam, {"variance_kappa": 2, "delay": True}),
    "0/1 Adam, watched": (ZeroOneAdam, {"variance_kappa": 2, "watch_interval": 1}),
    "0/1 Adam, uncompressed": (ZeroOneAdam, {"variance_kappa": 2, "compressor": "none"}),
    "1-bit Adam": (OneBitAdam, {"freeze_step": 9}),
    "soft sign": (SoftSignSGD, {"beta": 0.8}),
    "BinSGDM": (BinSGDM, {"beta": 0.8}),
    "SGDM": (SGDM, {}),
}


def model() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"matrix": (9, 13), "image": (4, 3, 5, 5), "vector": (70,), "other": (130,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["image"] = tensors["image"].to(memory_format=torch.channels_last)
    return {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}


def set_gradients(parameters: dict[str, torch.nn.Parameter], rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    for parameter in parameters.values():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = parameter.detach() + 0.5 * noise + 0.3 * rank
        else:
            parameter.grad = None


def masks() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    rows = torch.tensor([True] * 5 + [False] * 4)
    return {
        "matrix": rows,
        "image": torch.rand(4, 3, 5, 5, generator=generator) < 0.5,
        "vector": torch.rand(70, generator=generator) < 0.3,
    }


def masked_runs(rank: int, size: int) -> dict[str, tuple[list[str], bool, bool, bool]]:
    """By optimizer: fingerprints; whether masked elements did not move, the others did, and masked momentum is 0."""
    results = {}
    for name, (kind, options) in FAMILY.items():
        parameters = model()
        start = {key: p.detach().clone() for key, p in parameters.items()}
        optimizer = kind(parameters.items(), SCHEDULE, block_size=32, weight_decay=0.1, masks=masks(), **options)
        optimizer.attach(torch.nn.ParameterDict(parameters))
        prints, still = [], True
        for step in range(STEPS):
            set_gradients(parameters, rank, step)
            optimizer.step()
            prints.append(optimizer.fingerprint())
            for key, mask in masks().items():
                moved = parameters[key].detach() != start[key]
                still = still and not moved[~mask].any()
        moved_all = all((parameters[key].detach() != start[key])[mask].all() for key, mask in masks().items())
        moved_all = moved_all and bool((parameters["other"].detach() != start["other"]).all())
        momentum = dict(zip(parameters, optimizer._whole.named_views(optimizer.replica_state()["m"]), strict=True))
        clean = not any(momentum[key][1][~mask].any() for key, mask in masks().items())
        results[name] = prints, still, moved_all, clean
    return results


@pytest.mark.parametrize("replicas", [1, 2])
def test_masked_elements_stand_still(replicas: int) -> None:
    by_rank = run_ranks(masked_runs, replicas)
    for name in FAMILY:
        for prints, still, moved, clean in (of_rank[name] for of_rank in by_rank):
            assert prints == by_rank[0][name][0], name
            assert still, f"{name}: a masked element moved"
            assert moved, f"{name}: an element that is not masked did not move"
            assert clean, f"{name}: a masked element has momentum"


@pytest.mark.parametrize(
    "mask, message",
    [
        ({"matrx": torch.ones(9, dtype=torch.bool)}, "parameter 'matrx', which does not exist; did you mean 'matrix'"),
        ({"matrix": torch.ones(13, dtype=torch.bool)}, r"the mask of matrix is torch.bool\[13\]; expected"),
        ({"matrix": torch.ones(9)}, r"the mask of matrix is torch.float32\[9\]; expected bool\[9, 13\]"),
        ({"matrix": torch.ones(13, 9, dtype=torch.bool)}, r"\[13, 9\]; expected bool\[9, 13\]"),
        ({"vector": torch.tensor(True)}, r"torch.bool\[\]; expected bool\[70\]"),
    ],
)
def test_other_masks_are_refused(mask: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ZeroOneAdam(model().items(), 0.1, masks=mask)


def zero_rows(rank: int, size: int) -> dict[str, tuple[list[str], bool]]:
    """By optimizer: fingerprints, and whether rows whose gradient is always 0 kept their values without any mask."""
    results = {}
    for name, (kind, options) in FAMILY.items():
        table = torch.nn.Parameter(torch.randn(64, 16, generator=torch.Generator().manual_seed(0)))
        start = table.detach().clone()
        optimizer = kind([("table", table)], SCHEDULE, block_size=64, **options)
        prints = []
        for step in range(STEPS):
            noise = torch.randn(64, 16, generator=torch.Generator().manual_seed(100 * step + rank))
            table.grad = torch.where(torch.arange(64)[:, None] < 30, noise + 0.2, 0.0)
            optimizer.step()
            prints.append(optimizer.fingerprint())
        results[name] = prints, bool(torch.equal(table[30:], start[30:])) and not torch.equal(table[:30], start[:30])
    return results


def test_rows_without_gradient_stand_still_without_masks() -> None:
    """Rows 30 and 31 share a block with rows that move. BinSGDM has random bits for all elements: it needs a mask."""
    first, second = run_ranks(zero_rows, 2)
    for name, (prints, still) in first.items():
        assert prints == second[name][0], name
        assert still or name == "BinSGDM", name


def frozen_runs(rank: int, size: int, freeze_at: int, thaw_at: int) -> dict[str, list[dict[str, Any]]]:
    """By optimizer and step: fingerprint, and the weights and master weights of a frozen and another parameter."""
    results: dict[str, list[dict[str, Any]]] = {}
    for name, (kind, options) in FAMILY.items():
        parameters = model()
        optimizer = kind(parameters.items(), SCHEDULE, block_size=32, weight_decay=0.5, bucket_elements=128, **options)
        optimizer.attach(torch.nn.ParameterDict(parameters))
        results[name] = []
        for step in range(STEPS):
            if step == freeze_at:
                parameters["vector"].requires_grad_(False)
            if step == thaw_at:
                parameters["vector"].requires_grad_(True)
            set_gradients(parameters, rank, step)
            optimizer.step()
            state = {"kind": optimizer.last_step.kind, "synchronized": optimizer.last_step.synchronized}
            state["print"] = optimizer.fingerprint()
            masters = optimizer.master_parameters()
            for key in ("vector", "other"):
                state[key] = parameters[key].detach().clone()
                state[f"master {key}"] = masters[key].clone()
            results[name].append(state)
    return results


@pytest.mark.parametrize("freeze_at, thaw_at", slow_after(1, [(8, 15), (26, 34), (31, 99), (3, 5)]))
def test_a_parameter_frozen_late_stands_still_and_thaws(freeze_at: int, thaw_at: int) -> None:
    first, second = run_ranks(frozen_runs, 2, freeze_at, thaw_at)
    for name, trace in first.items():
        kept = trace[freeze_at - 1]["master vector"]
        for step, (one, other) in enumerate(zip(trace, second[name], strict=True)):
            where = f"{name}, step {step}"
            assert one["print"] == other["print"], where
            if one["synchronized"] and "delayed" not in name:  # with a delay the model moves when the next step begins
                assert torch.equal(one["vector"], other["vector"]), where
            if freeze_at <= step < thaw_at:
                for state in (one, other):
                    assert torch.equal(state["vector"], kept) and torch.equal(state["master vector"], kept), where
            elif step >= thaw_at and one["synchronized"]:
                assert not torch.equal(one["master vector"], kept), where
            assert torch.isfinite(one["vector"]).all() and one["vector"].abs().max() < 10, where
            if step and one["synchronized"]:
                assert not torch.equal(one["other"], trace[step - 1]["master other"]), where


def frozen_and_resumed(rank: int, size: int) -> list[str]:
    """Where a run that is saved and loaded with a frozen parameter differs from an uninterrupted one."""
    wrong = []
    for name, (kind, options) in FAMILY.items():

        def build(kind: type = kind, options: dict[str, Any] = options) -> tuple[dict[str, torch.nn.Parameter], Any]:
            parameters = model()
            return parameters, kind(parameters.items(), SCHEDULE, block_size=32, weight_decay=0.5, **options)

        parameters, optimizer = build()
        for step in range(STEPS):
            if step == 24:
                parameters["vector"].requires_grad_(False)
            if step > 24:
                twins, copy = build()
                twins["vector"].requires_grad_(False)
                copy.load_state_dict(optimizer.state_dict())
                for key, parameter in parameters.items():
                    if not torch.equal(parameter, twins[key]):
                        wrong.append(f"{name}: {key} loaded before step {step}")
            set_gradients(parameters, rank, step)
            optimizer.step()
    return wrong


@pytest.mark.slow
def test_a_frozen_parameter_stands_still_when_a_run_is_resumed() -> None:
    assert run_ranks(frozen_and_resumed, 2) == [[], []]


def short_sequences(rank: int, size: int) -> list[tuple[str, list[str], int]]:
    """BERT on 12 of 64 positions, by optimizer: fingerprint, problems, collectives started early."""
    results = []
    for name in ("0/1 Adam", "1-bit Adam"):
        kind, options = FAMILY[name]
        config = BertModelConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            max_position_embeddings=64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        bert = Bert(config, 50, binary_head=True)
        start = {key: p.detach().clone() for key, p in bert.named_parameters()}
        groups = weight_decay_groups(bert, 0.0)
        optimizer = kind(groups, SCHEDULE, block_size=128, bucket_elements=512, **options)
        optimizer.attach(bert)
        generator = torch.Generator().manual_seed(rank)
        early = 0
        with counting_exchanges() as count:
            for _ in range(STEPS):
                batch = {
                    "text": torch.randint(1, 50, (4, 12), generator=generator),
                    "types": torch.arange(12).expand(4, -1) // 6,
                    "padding_mask": torch.ones(4, 12, dtype=torch.long),
                    "labels": torch.randint(1, 50, (4, 12), generator=generator),
                    "loss_mask": (torch.rand(4, 12, generator=generator) < 0.4).float(),
                    "is_random": torch.randint(0, 2, (4,), generator=generator),
                }
                losses = bert.loss(batch)
                before = count[0]
                sum(losses.values()).backward()  # type: ignore[union-attr]
                early += count[0] - before
                optimizer.step()
                optimizer.zero_grad()
        wrong = []
        for key, parameter in bert.named_parameters():
            moved = parameter.detach() != start[key]
            if "position" in key:
                if moved[12:].any() or not moved[:12].all():
                    wrong.append(key)
            elif not moved.any():
                wrong.append(key)
        results.append((optimizer.fingerprint(), wrong, early))
    return results


@pytest.mark.slow
def test_position_rows_beyond_the_sequences_stand_still() -> None:
    first, second = run_ranks(short_sequences, 2)
    for one, other in zip(first, second, strict=True):
        assert one[0] == other[0]
        assert one[1] == other[1] == []
        assert one[2] > STEPS, "exchanges did not start early"
