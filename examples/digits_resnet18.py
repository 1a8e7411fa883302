"""ResNet-18 on scikit-learn's handwritten digits, in a custom training loop that uses only the optimizer.

    torchrun --nproc-per-node 2 examples/digits_resnet18.py
    torchrun --nproc-per-node 2 examples/digits_resnet18.py --optimizer adam    # DistributedDataParallel and AdamW

The images (1797 of 8 x 8 pixels, ten classes) come with scikit-learn: nothing is downloaded, and CPUs are enough.
Only batch normalization needs attention: see ``average_batch_norm``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron01 import LRSchedule, OneBitAdam, ZeroOneAdam

NUM_CLASSES = 10
TEST_SHARE = 0.5


class BasicBlock(nn.Module):
    """Residual block of two 3 x 3 convolutions (He et al. 2016)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, images: Tensor) -> Tensor:  # (b, channels_in, h, w) -> (b, channels, h / stride, w / stride)
        hidden = F.relu(self.norm1(self.conv1(images)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class ResNet18(nn.Sequential):
    """(b, 1, 8, 8) images to (b, 10) logits. As for CIFAR, the stem is one 3 x 3 convolution without pooling.

    Args:
        width: channels of the first stage, 64 in the original; each of the other three doubles them.
    """

    def __init__(self, width: int) -> None:
        stages = []
        channels_in = width
        for channels, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            stages += [BasicBlock(channels_in, channels, stride), BasicBlock(channels, channels, 1)]
            channels_in = channels
        stem = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, NUM_CLASSES)]
        super().__init__(*stem, *stages, *head)


def load_data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images and labels for training and for testing; the split does not depend on the seed."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16  # (1797, 1, 8, 8) in [0, 1]
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order.split([int(TEST_SHARE * len(order)), len(order) - int(TEST_SHARE * len(order))])
    return (images[train], labels[train]), (images[test], labels[test])


@torch.no_grad()
def average_batch_norm(model: nn.Module) -> None:
    """Average the running statistics of batch normalization over all replicas.

    Each replica normalizes with the statistics of its own batch and keeps its own running means and variances. The
    optimizer does not handle these buffers, as they are not parameters. Training does not read them either, so it is
    enough to average them before evaluating or saving, in one message. The variance over all replicas is the mean of
    the variances plus the variance of the means. (DistributedDataParallel broadcasts replica 0's buffers before each
    forward pass; the average then adds only the last batch of the other replicas.)
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    sizes = [norm.num_features for norm in norms]
    means = torch.cat([norm.get_buffer("running_mean") for norm in norms])
    variances = torch.cat([norm.get_buffer("running_var") for norm in norms])
    moments = torch.stack([means, variances + means.square()])  # E[a] and E[a^2] of every channel
    dist.all_reduce(moments)
    moments /= dist.get_world_size()
    means, variances = moments[0], moments[1] - moments[0].square()
    for norm, mean, variance in zip(norms, means.split(sizes), variances.split(sizes), strict=True):
        norm.get_buffer("running_mean").copy_(mean)
        norm.get_buffer("running_var").copy_(variance)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of correctly classified images."""
    model.eval()
    correct = float((model(images).argmax(1) == labels).float().mean())
    model.train()
    return correct


def is_equal_everywhere(model: nn.Module) -> bool:
    """True if weights and buffers are bit-identical on all replicas."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1


@dataclass
class Training:
    """The parts of the loop that differ between the optimizers.

    Attributes:
        module: the module to call in the forward pass.
        step: takes the optimizer step of the given number; returns its kind and the bytes it sent.
        equal_weights: context manager in which the model holds the same weights on every replica.
    """

    module: nn.Module
    step: Callable[[int], tuple[str, int]]
    equal_weights: Callable[[], AbstractContextManager[None]]


def with_zero_one_adam(model: nn.Module, groups: list[dict[str, Any]], schedule: LRSchedule) -> Training:
    """The model is not wrapped: no DistributedDataParallel, no learning-rate scheduler."""
    return compressed(model, ZeroOneAdam(groups, schedule, gradient_wire_dtype="4bit"))


def with_one_bit_adam(model: nn.Module, groups: list[dict[str, Any]], schedule: LRSchedule) -> Training:
    """As with 0/1 Adam; the first 15 % of the steps are in full precision, as in its published experiments."""
    assert schedule.total_steps is not None
    return compressed(model, OneBitAdam(groups, schedule, freeze_step=math.ceil(0.15 * schedule.total_steps)))


def compressed(model: nn.Module, optimizer: ZeroOneAdam | OneBitAdam) -> Training:
    def step(number: int) -> tuple[str, int]:
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last_step is not None
        return optimizer.last_step.kind, optimizer.last_step.bytes_sent

    return Training(model, step, optimizer.replicated_weights)


def with_adam(model: nn.Module, groups: list[dict[str, Any]], schedule: LRSchedule) -> Training:
    """torch's AdamW on gradients that DistributedDataParallel averages."""
    optimizer = torch.optim.AdamW(groups)
    # a ring all-reduce of fp32 gradients sends this much
    replicas, parameters = dist.get_world_size(), sum(parameter.numel() for parameter in model.parameters())
    bytes_sent = 2 * (replicas - 1) * 4 * parameters // replicas

    def step(number: int) -> tuple[str, int]:
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr(number)
        optimizer.step()
        optimizer.zero_grad()
        return "full", bytes_sent

    return Training(DistributedDataParallel(model), step, nullcontext)


OPTIMIZERS = {"zero_one_adam": with_zero_one_adam, "one_bit_adam": with_one_bit_adam, "adam": with_adam}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ResNet-18 on handwritten digits with 0/1 Adam, 1-bit Adam or Adam.")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="zero_one_adam")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="images of one replica")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage; 64 in the original")
    parser.add_argument("--lr", type=float, default=1.6e-2, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-interval", type=int, default=50)
    arguments = parser.parse_args()
    for name, value in vars(arguments).items():
        if type(value) is int and name != "seed" and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; expected at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    rank, replicas = dist.get_rank(), dist.get_world_size()
    (images, labels), test = load_data()

    torch.manual_seed(arguments.seed)
    model = ResNet18(arguments.width)
    named = list(model.named_parameters())
    groups = [
        {"params": [(name, p) for name, p in named if p.dim() > 1], "weight_decay": arguments.weight_decay},
        {"params": [(name, p) for name, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]
    schedule = LRSchedule(
        style="cosine", peak_lr=arguments.lr, warmup_steps=arguments.steps // 10, total_steps=arguments.steps
    )
    training = OPTIMIZERS[arguments.optimizer](model, groups, schedule)

    generator = torch.Generator().manual_seed(arguments.seed * replicas + rank)  # each replica samples its own images
    bytes_sent = 0
    for step in range(arguments.steps):
        batch = torch.randint(len(labels), (arguments.batch_size,), generator=generator)
        loss = F.cross_entropy(training.module(images[batch]), labels[batch])
        loss.backward()
        kind, sent = training.step(step)
        bytes_sent += sent
        if rank == 0 and (step % arguments.log_interval == 0 or step == arguments.steps - 1):
            print(f"step {step}  loss {loss.item():.4f}  {kind}  {bytes_sent / 1e6:.2f} MB sent", flush=True)

    average_batch_norm(model)
    with training.equal_weights():
        result = {
            "optimizer": arguments.optimizer,
            "seed": arguments.seed,
            "accuracy": round(accuracy(model, *test), 4),
            "megabytes_sent": round(bytes_sent / 1e6, 3),
            "bits_per_parameter_and_step": round(
                8 * bytes_sent / sum(p.numel() for _, p in named) / max(1, arguments.steps), 3
            ),
            "replicas_are_equal": is_equal_everywhere(model),
        }
    if rank == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
