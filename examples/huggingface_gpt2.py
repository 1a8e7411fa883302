"""A small GPT-2 of Hugging Face's transformers, from random weights, trained with 0/1 Adam on the shipped text.

    torchrun --nproc-per-node 2 examples/huggingface_gpt2.py --save checkpoints/huggingface
    torchrun --nproc-per-node 2 examples/huggingface_gpt2.py --save checkpoints/huggingface --steps 200 --resume
    torchrun --nproc-per-node 2 examples/huggingface_gpt2.py --precision bf16 --export exported/

Nothing is downloaded. The explicit loop shows gradient accumulation, evaluation with the replicated weights,
checkpoints with bit-exact resume, and export as a model that ``from_pretrained`` reads.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from megatron01 import LRSchedule, ZeroOneAdam

DATA = Path(__file__).resolve().parents[1] / "data"
END_OF_TEXT = "<|endoftext|>"
HELD_OUT_SHARE = 0.1


def load_tokens(max_documents: int | None) -> tuple[Tensor, Tensor, int]:
    """Token ids (int64, 1-dimensional) of the training and of the held-out text, and the vocabulary size."""
    vocabulary = DATA / "vocab" / "gpt2-tiny-5000-vocab.json"
    tokenizer = ByteLevelBPETokenizer.from_file(str(vocabulary), str(DATA / "vocab" / "gpt2-tiny-5000-merges.txt"))
    with lzma.open(DATA / "corpus.jsonl.xz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines][:max_documents]
    end = json.loads(vocabulary.read_text())[END_OF_TEXT]
    tokens = torch.tensor([token for text in tokenizer.encode_batch(texts) for token in (*text.ids, end)])
    num_training = int(len(tokens) * (1 - HELD_OUT_SHARE))
    return tokens[:num_training], tokens[num_training:], tokenizer.get_vocab_size()


def draw_batch(tokens: Tensor, arguments: argparse.Namespace, step: int, part: int) -> Tensor:
    """(b, s) random sequences of the text, seeded by step and replica: a resumed run needs only the step."""
    numbers = np.random.default_rng((arguments.seed, step, part, dist.get_rank()))
    starts = numbers.integers(len(tokens) - arguments.seq_length, size=arguments.micro_batch_size)
    return torch.stack([tokens[start : start + arguments.seq_length] for start in starts])


def accumulate_in_fp32(parameters: Iterable[Any]) -> None:
    """Accumulate gradients in fp32 in ``main_grad``, which the optimizer reads first and ``zero_grad`` clears.

    The gradients of a bf16 model are bf16; accumulating many of them in bf16 loses small ones.
    """

    def add(parameter: Any) -> None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.register_post_accumulate_grad_hook(add)


@torch.no_grad()
def held_out_loss(model: GPT2LMHeadModel, tokens: Tensor, arguments: argparse.Namespace) -> float:
    """Mean loss over the first sequences of the held-out text, divided among the replicas."""
    pieces = tokens[: len(tokens) // arguments.seq_length * arguments.seq_length].view(-1, arguments.seq_length)
    own = pieces[: arguments.eval_sequences][dist.get_rank() :: dist.get_world_size()]
    sums = torch.zeros(2, dtype=torch.float64)  # loss times sequences, sequences
    model.eval()
    for batch in own.split(arguments.micro_batch_size):
        sums += torch.tensor([model(input_ids=batch, labels=batch).loss.double() * len(batch), len(batch)])
    model.train()
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def save(folder: Path, step: int, optimizer: ZeroOneAdam) -> None:
    """Save the state of every replica, as error feedback and local steps differ. It includes the weights.

    ``latest`` names the checkpoint once all files are written, so a run that dies in between resumes from the previous
    one.
    """
    checkpoint = folder / f"step_{step:06d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    state = {"step": step, "optimizer": optimizer.state_dict(), "random_state": torch.get_rng_state()}
    torch.save(state, checkpoint / f"replica_{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "latest.new").write_text(checkpoint.name)
        os.replace(folder / "latest.new", folder / "latest")


def resume(folder: Path, optimizer: ZeroOneAdam) -> int:
    """Load a checkpoint of ``save``, on the same number of replicas; returns the number of steps taken."""
    checkpoint = folder / (folder / "latest").read_text()
    state = torch.load(checkpoint / f"replica_{dist.get_rank()}.pt", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])  # sets the model's weights, too
    torch.set_rng_state(state["random_state"])  # for dropout
    return int(state["step"])


def is_equal_everywhere(optimizer: ZeroOneAdam) -> bool:
    """True if master weights and second moment are bit-identical on all replicas, as they must be at any step."""
    prints = [""] * dist.get_world_size()
    dist.all_gather_object(prints, optimizer.fingerprint())
    return len(set(prints)) == 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small GPT-2 of transformers with 0/1 Adam.")
    parser.add_argument("--steps", type=int, default=100, help="at which to stop")
    parser.add_argument("--schedule-steps", type=int, default=200, help="length of the learning-rate schedule")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="sequences of one replica in one backward pass")
    parser.add_argument("--accumulation", type=int, default=2, help="backward passes in a step")
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the model; masters are fp32")
    parser.add_argument("--documents", type=int, help="read only so many")
    parser.add_argument("--eval-sequences", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--save", type=Path, help="folder for checkpoints, one at the end and every --save-interval")
    parser.add_argument("--save-interval", type=int, default=50)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the --save folder")
    parser.add_argument("--export", type=Path, help="folder for the trained model")
    arguments = parser.parse_args()
    for name, value in vars(arguments).items():
        if type(value) is int and name != "seed" and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; expected at least 1")
    if arguments.resume and not arguments.save:
        parser.error("--resume needs --save, the folder of the checkpoints")
    if arguments.resume and not (arguments.save / "latest").is_file():
        parser.error(f"--resume found no checkpoint in {arguments.save}; leave it out to start anew")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training_tokens, held_out_tokens, vocab_size = load_tokens(arguments.documents)

    torch.manual_seed(arguments.seed)
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=arguments.seq_length,
        n_embd=arguments.hidden_size,
        n_layer=arguments.layers,
        n_head=arguments.heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.loss_type = "ForCausalLM"
    model = GPT2LMHeadModel(config)  # the head shares the embedding's weight
    model.train()
    if arguments.precision == "bf16":
        accumulate_in_fp32(model.bfloat16().parameters())
    named = list(model.named_parameters())  # a shared weight is listed once
    groups = [
        {"params": [(name, p) for name, p in named if p.dim() > 1], "weight_decay": 0.01},
        {"params": [(name, p) for name, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]
    steps = arguments.schedule_steps
    schedule = LRSchedule(style="cosine", peak_lr=arguments.lr, warmup_steps=steps // 10, total_steps=steps)
    optimizer = ZeroOneAdam(groups, schedule, max_grad_norm=1.0)
    torch.manual_seed(arguments.seed * dist.get_world_size() + rank)  # dropout differs between replicas
    first = resume(arguments.save, optimizer) if arguments.resume else 0

    bytes_sent = 0
    for step in range(first, arguments.steps):
        step_loss = 0.0
        for part in range(arguments.accumulation):
            batch = draw_batch(training_tokens, arguments, step, part)
            loss = model(input_ids=batch, labels=batch).loss / arguments.accumulation
            loss.backward()  # accumulates gradients, without communication
            step_loss += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        report = optimizer.last_step
        assert report is not None
        bytes_sent += report.bytes_sent
        if rank == 0 and (step % arguments.log_interval == 0 or step == arguments.steps - 1):
            print(f"step {step}  loss {step_loss:.4f}  {report.kind}/{report.interval}  {bytes_sent / 1e6:.2f} MB sent")
        if arguments.save and ((step + 1) % arguments.save_interval == 0 or step == arguments.steps - 1):
            save(arguments.save, step + 1, optimizer)

    with optimizer.replicated_weights():  # the same on all replicas, at any step
        loss = held_out_loss(model, held_out_tokens, arguments)
        if arguments.export and rank == 0:
            model.save_pretrained(arguments.export)
    result = {
        "steps": arguments.steps,
        "held_out_loss": round(loss, 4),
        "bits_per_parameter_and_step": round(
            8 * bytes_sent / sum(p.numel() for _, p in named) / max(1, arguments.steps - first), 3
        ),
        "replicas_are_equal": is_equal_everywhere(optimizer),
        "fingerprint": optimizer.fingerprint(),
    }
    if rank == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
