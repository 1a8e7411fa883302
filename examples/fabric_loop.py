"""A training loop with Lightning Fabric and 0/1 Adam.

torchrun --nproc-per-node 2 examples/fabric_loop.py
"""

from __future__ import annotations

import json
import os

import torch
from lightning.fabric import Fabric

from megatron01 import LRSchedule, ZeroOneAdam
from megatron01.integrations.lightning import CompressedFabricDDP

STEPS = 100


def main() -> None:
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = "auto" if torch.cuda.is_available() else "cpu"
    fabric = Fabric(strategy=CompressedFabricDDP(), devices=devices, accelerator=device)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    inputs = torch.randn(16 * STEPS * devices, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(-1, keepdim=True))
    layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    layers.to(fabric.device)  # before the optimizer is built, which moves the weights into one flat buffer
    schedule = LRSchedule(style="cosine", peak_lr=1e-2, warmup_steps=10, total_steps=STEPS)
    ours = ZeroOneAdam(layers.named_parameters(), schedule, max_grad_norm=1.0)
    model, optimizer = fabric.setup(layers, ours)
    losses = []
    for batch, target in fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=16)):
        loss = (model(batch) - target).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    held_out = inputs[:64].to(fabric.device)
    with ours.replicated_weights():  # the same on all replicas
        final = (layers(held_out) - held_out.sum(-1, keepdim=True)).square().mean().item()
    if fabric.is_global_zero:
        print(json.dumps({"loss": final, "fingerprint": ours.fingerprint()}))


if __name__ == "__main__":
    main()
