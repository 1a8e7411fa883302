"""transformers' Trainer with 0/1 Adam: a small GPT-2 from random weights learns to count.

torchrun --nproc-per-node 2 examples/transformers_trainer.py --output out
torchrun --nproc-per-node 2 examples/transformers_trainer.py --output out --resume
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from megatron01.integrations.transformers import CompressedTrainer


def counting(num_sequences: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up from a random number, modulo 64."""
    starts = torch.randint(64, (num_sequences,), generator=torch.Generator().manual_seed(0))
    rows = [(start + torch.arange(16)) % 64 for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="out", help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--cpu", action=argparse.BooleanOptionalAction, default=not torch.cuda.is_available())
    given = parser.parse_args()
    if given.steps < 1:  # the Trainer would train by epochs
        parser.error(f"--steps is {given.steps}; expected at least 1")
    if given.resume and not any(Path(given.output).glob("checkpoint-*")):
        parser.error(f"--resume found no checkpoint in {given.output}; leave it out to start anew")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(
        output_dir=given.output,
        max_steps=given.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        save_steps=50,
        logging_steps=10,
        bf16=True,
        use_cpu=given.cpu,
        report_to=[],
    )
    data = counting(1024)
    trainer = CompressedTrainer(GPT2LMHeadModel(config), args, train_dataset=data, eval_dataset=data[:64])
    trainer.train(resume_from_checkpoint=given.resume)
    metrics = trainer.evaluate()  # with the replicated weights
    if trainer.is_world_process_zero():
        print(json.dumps({"loss": metrics["eval_loss"], "fingerprint": trainer.optimizer.optimizer.fingerprint()}))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
