"""Lightning's Trainer with 0/1 Adam.

torchrun --nproc-per-node 2 examples/lightning_trainer.py
"""

from __future__ import annotations

import json
import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from megatron01 import LRSchedule, ZeroOneAdam
from megatron01.integrations import ShownSchedule
from megatron01.integrations.lightning import CompressedDDP

STEPS = 100


class Regression(pl.LightningModule):
    """A small network that learns a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _: int) -> None:  # with the replicated weights
        self.log("loss", mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        schedule = LRSchedule(style="cosine", peak_lr=1e-2, warmup_steps=10, total_steps=STEPS)
        optimizer = ZeroOneAdam(self.named_parameters(), schedule, max_grad_norm=1.0)
        return [optimizer], [{"scheduler": ShownSchedule(optimizer), "interval": "step"}]


def main() -> None:
    pl.seed_everything(0, verbose=False)
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    inputs = torch.randn(16 * STEPS * devices, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(-1, keepdim=True))
    training, validation = (torch.utils.data.DataLoader(data, batch_size=16) for _ in range(2))
    trainer = pl.Trainer(
        strategy=CompressedDDP(),
        devices=devices,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Regression()
    trainer.fit(module, training, validation)
    if trainer.is_global_zero:
        optimizer = module.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, ZeroOneAdam)
        print(json.dumps({"loss": float(trainer.callback_metrics["loss"]), "fingerprint": optimizer.fingerprint()}))


if __name__ == "__main__":
    main()
