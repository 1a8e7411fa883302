"""A training loop with accelerate and 0/1 Adam.

accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import json

import torch
from accelerate import Accelerator

from megatron01 import LRSchedule, ZeroOneAdam
from megatron01.integrations.accelerate import prepare

STEPS = 100


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(accelerator.device)
    schedule = LRSchedule(style="cosine", peak_lr=1e-2, warmup_steps=10, total_steps=STEPS)
    optimizer = ZeroOneAdam(model.named_parameters(), schedule, max_grad_norm=1.0)
    inputs = torch.randn(8 * 2 * STEPS * accelerator.num_processes, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(-1, keepdim=True))
    wrapped, prepared, loader = prepare(accelerator, model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
    losses = []
    for batch, target in loader:
        with accelerator.accumulate(wrapped):
            loss = (wrapped(batch) - target).square().mean()
            accelerator.backward(loss)
            prepared.step()
            prepared.zero_grad()
            losses.append(loss.item())
    if accelerator.is_main_process:
        print(json.dumps({"loss": sum(losses[-10:]) / 10, "fingerprint": optimizer.fingerprint()}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
