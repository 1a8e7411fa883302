from __future__ import annotations

import itertools
import math
import types
from pathlib import Path

import pytest
import torch

from megatron01.config.commands import FineTuneConfig
from megatron01.finetune.bench import Training, count_steps, evaluate, fine_tune, shuffled_batches
from megatron01.finetune.results import Run


def settings(**changes) -> FineTuneConfig:
    return FineTuneConfig(load="model", output=Path(), **{"weight_decay": 0.1} | changes)


def train(model, *, seed, learning_rate=0.1, progress=lambda run, done, total: None, **changes) -> Training:
    run = Run("", 4, learning_rate, seed)
    return fine_tune(model, EXAMPLES, collate, settings(**changes), run, progress)


class Model(torch.nn.Module):
    """Linear regression on three features, with a dropout that may be 0."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear = torch.nn.Linear(3, 1)
        self.norm = torch.nn.LayerNorm(3)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x, y=None):
        found = self.linear(self.dropout(self.norm(x)))[:, 0]
        return types.SimpleNamespace(loss=None if y is None else ((found - y) ** 2).mean(), found=found)


EXAMPLES = [(number, number * 0.5 + 1, -number) for number in range(10)]


def collate(rows):
    x = torch.tensor(rows, dtype=torch.float32)
    return {"x": x, "y": x.sum(1)}


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(("fraction", "warmup"), [(0.0, 0), (0.1, 3), (0.5, 11)])
def test_the_learning_rate_rises_from_0_and_falls_to_0(fraction, warmup, monkeypatch):
    rates = []

    class Recording(torch.optim.AdamW):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            super().step(closure)

    monkeypatch.setattr("torch.optim.AdamW", Recording)
    train(Model(), seed=0, epochs=7.0, warmup_fraction=fraction)
    assert len(rates) == count_steps(10, 4, 7.0) == 21
    expected = [step / warmup if step < warmup else (21 - step) / (21 - warmup) for step in range(21)]
    assert rates == pytest.approx([0.1 * share for share in expected])


def test_a_run_of_one_step_trains():
    model = Model()
    before = weights(model)
    assert train(model, seed=0, epochs=0.1).num_steps == 1
    assert not torch.equal(weights(model), before)


def test_training_is_adam_with_decoupled_decay_and_clipping():
    """Against a plain loop: an incomplete last batch, clipping, and no weight decay of vectors."""
    model, plain = Model(), Model()
    trained = train(model, seed=5, clip_grad=0.3)
    assert trained.num_steps == 9
    decaying = [plain.linear.weight]
    others = [plain.linear.bias, plain.norm.weight, plain.norm.bias]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.999), eps=1e-8)
    batches = shuffled_batches(10, 4, 5)
    for step in range(9):
        for group in optimizer.param_groups:  # one step of warm-up
            group["lr"] = 0.1 * (0 if step == 0 else (9 - step) / 8)
        optimizer.zero_grad()
        loss = plain(**collate([EXAMPLES[place] for place in next(batches)])).loss
        loss.backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()]).norm()
        for parameter in plain.parameters():
            parameter.grad *= min(1.0, 0.3 / (float(norm) + 1e-6))
        optimizer.step()
    assert trained.loss == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)


def test_the_seed_decides_order_and_dropout():
    runs = []
    for seed in (1, 1, 2):
        model = Model(dropout=0.3)
        train(model, seed=seed)
        runs.append(weights(model))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_each_epoch_has_all_examples_in_another_order():
    batches = list(itertools.islice(shuffled_batches(10, 4, 3), 6))
    epochs = [sum(batches[:3], []), sum(batches[3:], [])]  # noqa: RUF017
    assert [len(batch) for batch in batches] == [4, 4, 2] * 2
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]


def test_parts_of_epochs():
    assert count_steps(10, 4, 0.5) == 2
    assert count_steps(10, 4, 0.01) == 1


def test_a_loss_that_is_no_number_ends_the_training():
    steps = []
    trained = train(
        Model(), seed=0, learning_rate=1e35, epochs=100.0, clip_grad=0.0,
        progress=lambda run, done, total: steps.append((done, total)),
    )  # fmt: skip
    assert trained == Training(num_steps=50, loss=None)
    assert steps == [(step, 300) for step in range(1, 50)]


def test_weights_that_the_last_step_ruins_are_a_run_that_diverged():
    """No loss tells of them: that of the last step was computed before it."""
    model, factors = Model(), iter((1.0, math.inf))
    model.linear.weight.register_hook(lambda gradient: gradient * next(factors))
    assert train(model, seed=0, epochs=0.5) == Training(num_steps=2, loss=None)


def test_bf16_computes_in_bf16_and_keeps_fp32():
    model, exact = Model(), Model()
    train(model, seed=0, precision="bf16", learning_rate=1e-2)
    train(exact, seed=0, learning_rate=1e-2)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not torch.equal(weights(model), weights(exact))
    torch.testing.assert_close(weights(model), weights(exact), rtol=0.05, atol=0.05)


def test_evaluation_takes_examples_of_one_length_together_and_no_dropout():
    rows = [(1.0,) * length for length in (3, 1, 2, 1, 3)]
    seen = []

    class Lengths(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = torch.nn.Dropout(0.9)
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            seen.append(x.shape[1])
            assert not torch.is_grad_enabled()
            return self.dropout(x).sum(1) * self.scale

    def pad(batch):
        longest = max(map(len, batch))
        return {"x": torch.tensor([[*row, *([0.0] * (longest - len(row)))] for row in batch])}

    found = {}
    for places, output in evaluate(Lengths(), rows, pad, settings(eval_batch_size=2)):
        found |= dict(zip(places, output.tolist(), strict=True))
    assert found == {0: 3.0, 1: 1.0, 2: 2.0, 3: 1.0, 4: 3.0}
    assert seen == [1, 3, 3]
