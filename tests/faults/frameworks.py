"""Fault injection in other frameworks' training loops, whose checkpoints hold the state of every replica."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron01 import LRSchedule, ZeroOneAdam
from tests.faults.attempts import LONGEST_SECONDS, start_ranks
from tests.faults.injection import Injection
from tests.faults.outcome import Outcome
from tests.faults.process_pool import ProcessPool
from tests.faults.settings import Setting
from tests.integration.framework_runs import Data, Model

if TYPE_CHECKING:
    from tests.faults.plans import Plan

MODULES = ("megatron01.integrations.transformers", "megatron01.integrations.accelerate")
STEPS, SAVED_EVERY, BATCH = 16, 5, 4
SCHEDULE = LRSchedule(style="cosine", peak_lr=0.02, warmup_steps=2, total_steps=STEPS)
OPTIONS: dict[str, Any] = {"block_size": 32, "variance_kappa": 2}
STATE = {"trainer": "replica_%d_of_2.pt", "accelerate": "replicas/replica_%d_of_2.pt"}
"""File of a replica's state in a checkpoint."""


def trainer(folder: Path, checkpoint: Path | None) -> tuple[torch.nn.Module, ZeroOneAdam]:
    """transformers' Trainer."""
    from transformers import TrainingArguments

    from megatron01.integrations.transformers import CompressedTrainer

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[],
        learning_rate=0.02, warmup_steps=2, lr_scheduler_type="cosine", disable_tqdm=True, logging_strategy="no",
        save_strategy="steps", save_steps=SAVED_EVERY,
    )  # fmt: skip
    made = CompressedTrainer(model=Model(), args=arguments, train_dataset=Data(), compressed_arguments=OPTIONS)
    made.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return made.model, made._ours


def accelerate(folder: Path, checkpoint: Path | None) -> tuple[torch.nn.Module, ZeroOneAdam]:
    """A loop with accelerate."""
    from accelerate import Accelerator

    from megatron01.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    model = Model()
    optimizer = ZeroOneAdam(model.named_parameters(), SCHEDULE, **OPTIONS)
    loader = torch.utils.data.DataLoader(Data(), batch_size=BATCH)
    wrapped, prepared, batches = prepare(accelerator, model, optimizer, loader)
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
        batches = accelerator.skip_first_batches(batches, optimizer.step_count)
    for batch in batches:
        accelerator.backward(wrapped(**batch)["loss"])
        prepared.step()
        prepared.zero_grad()
        if optimizer.step_count % SAVED_EVERY == 0:
            accelerator.save_state(str(folder / f"checkpoint-{optimizer.step_count}"))
        if optimizer.step_count == STEPS:
            break
    return model, optimizer


LOOPS: dict[str, Callable[[Path, Path | None], tuple[torch.nn.Module, ZeroOneAdam]]] = {
    "trainer": trainer,
    "accelerate": accelerate,
}


def newest(folder: Path) -> Path:
    """The newest checkpoint in a run's folder."""
    return max((folder / "saved").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


def try_fault(pool: ProcessPool, plan: Plan, references: Path, folder: Path) -> Outcome:
    """Inject a fault into a run, and restart it; a checkpoint that it refuses is deleted, as the error advises."""
    assert plan.framework is not None
    outcome = Outcome()
    reference = _reference(pool, plan.framework, references)
    if plan.injections:
        statuses, _ = _attempt(pool, plan.framework, folder, "first", plan.injections)
        outcome.fired = (folder / "first" / "fired").exists()
        outcome.hung = None in statuses
        if outcome.fired:
            outcome.noticed = 0 not in statuses or _result(folder) == reference
    else:
        shutil.copytree(references / plan.framework / "saved", folder / "saved")
        plan.before()
    for attempt in range(3):  # the newest checkpoint, the one before it, none
        statuses, messages = _attempt(pool, plan.framework, folder, f"again{attempt}", {})
        outcome.hung |= None in statuses
        if statuses == [0, 0]:
            outcome.recovered = _result(folder) == reference
            outcome.undetected = not outcome.recovered
            break
        outcome.messages.append(messages[-300:])
        if not (folder / "saved").is_dir() or not list((folder / "saved").iterdir()):
            outcome.problems.append(f"the run did not end well: {messages[-300:]}")
            break
        if not plan.injections:
            outcome.noticed = "is damaged, or save_state did not write it" in messages
        shutil.rmtree(newest(folder))
        outcome.lost_steps = SAVED_EVERY
    if not outcome.recovered or outcome.noticed is False or outcome.hung:
        outcome.problems.append(f"statuses {statuses}; {outcome.messages}")
    return outcome


def _reference(pool: ProcessPool, name: str, references: Path) -> dict[str, Any]:
    folder = references / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # jobs of one campaign share their references
        if not (folder / "result.json").exists():
            statuses, messages = _attempt(pool, name, folder, "output", {})
            assert statuses == [0, 0], messages
    return _result(folder)


def _result(folder: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    except FileNotFoundError:
        return {}
    return result


def _attempt(
    pool: ProcessPool, name: str, folder: Path, output: str, injections: dict[int, list[Injection]]
) -> tuple[list[int | None], str]:
    """The ranks' exit statuses, None for one that did not exit, and their stderr."""
    place = folder / output
    arguments = [(name, folder, injections.get(rank, []), place / "fired") for rank in range(2)]
    children = start_ranks(pool, Setting(), place, _train, *arguments)
    is_over = pool.wait(children, LONGEST_SECONDS)
    statuses = [child.status for child in children]
    if not is_over:
        for child in children:
            child.signal(signal.SIGKILL)
        pool.wait(children, 10.0)
    return statuses, "".join((place / f"rank{rank}.err").read_text(errors="replace") for rank in range(2))


def _train(name: str, folder: Path, injections: Sequence[Injection], fired: Path) -> None:
    """One rank of a run."""
    for injection in injections:
        injection.arm(fired)
    torch.set_num_threads(1)
    (folder / "saved").mkdir(exist_ok=True)
    is_fresh = not list((folder / "saved").glob("checkpoint-*"))
    model, optimizer = LOOPS[name](folder / "saved", None if is_fresh else newest(folder))
    result = {"fingerprint": optimizer.fingerprint()}
    with optimizer.replicated_weights():
        result["weights"] = str(sum(parameter.detach().double().sum().item() for parameter in model.parameters()))
    if os.environ["RANK"] == "0":
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
