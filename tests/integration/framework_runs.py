"""Runs of each framework and of the bare loop, for ``test_frameworks.py``, which starts this with torchrun.

    framework_runs.py trainer|accelerate|lightning|fabric FOLDER [resume] [fp16]

With ``fp16`` the framework gets a ``GradScaler`` for CPUs, as it would have one for GPUs, and two rows of the data
overflow on the replica that reads them. Replica 0 prints a JSON object. Each framework's batches are recorded, and the
bare loop trains on the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron01 import LRSchedule, ZeroOneAdam
from megatron01.integrations import ShownSchedule

STEPS, SAVED, ACCUMULATION, BATCH = 20, 16, 2, 4
EPOCH = 4  # steps; Lightning's loader restarts the epoch if a run resumes in its middle
FP16 = "fp16" in sys.argv
SCHEDULE = LRSchedule(style="cosine", peak_lr=0.02, warmup_steps=2, total_steps=STEPS)
OPTIONS: dict[str, Any] = {"block_size": 32, "variance_kappa": 2, "max_grad_norm": 1.0, "weight_decay": 0.01}


def autocast() -> Any:
    """The arithmetic of all runs here."""
    return torch.autocast("cpu", torch.float16 if FP16 else torch.bfloat16)


def new_scaler() -> torch.amp.GradScaler | None:
    """One of those that frameworks make for GPUs."""
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4) if FP16 else None


class Model(torch.nn.Module):
    """Three layers, and a record of the batches that it was trained on.

    In fp16 it does its own mixed precision, which frameworks have for GPUs only.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.GELU(), torch.nn.Linear(24, 1))
        self.seen: list[dict[str, torch.Tensor]] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen.append({"x": x.clone(), "y": y.clone()})
        with autocast() if FP16 else contextlib.nullcontext():
            found = self.layers(x)
        return {"loss": (found.float() - y).square().mean()}


class Data(torch.utils.data.Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(2 * ACCUMULATION * BATCH * STEPS, 8, generator=generator)
        self.y = self.x.sum(-1, keepdim=True).sin()
        if FP16:
            self.x[[40, 296, 300]] = 1e6  # above what fp16 holds: one replica's gradients of that step are not finite

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Counted(ZeroOneAdam):
    """Records the bytes it has sent, and the learning rates."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.sent = [*getattr(self, "sent", []), self.last_step.bytes_sent]
        self.kinds = [*getattr(self, "kinds", []), self.last_step.kind]
        self.rates = [*getattr(self, "rates", []), self.last_step.lr]
        return result


def outcome(optimizer: Counted, model: torch.nn.Module, scaler: Any) -> dict[str, Any]:
    """Replicated results, and results by replica."""
    own = (optimizer.fingerprint(), 1.0 if scaler is None else scaler.get_scale(), optimizer.kinds)
    rows: list[Any] = [own]
    if dist.is_initialized():
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, own)
    prints, scales, kinds = zip(*rows, strict=True)
    assert len(set(prints)) == 1
    with optimizer.replicated_weights():
        weights = float(sum(parameter.detach().double().sum() for parameter in model.parameters()))
    found = {"fingerprint": prints[0], "sent": sum(optimizer.sent), "kinds": optimizer.kinds, "weights": weights}
    found |= {"scales": scales, "skipped": [of_one.count("skipped") for of_one in kinds]}
    return {**found, "steps": optimizer.step_count, "rates": optimizer.rates}


def bare(seen: list[dict[str, torch.Tensor]], groups: Any, options: dict[str, Any], schedule: Any) -> Any:
    model, scaler = Model(), new_scaler()
    named = dict(model.named_parameters())
    if groups is not None:
        groups = [{**group, "params": [(name, named[name]) for name in group["params"]]} for group in groups]
    optimizer = Counted(groups or model.named_parameters(), schedule, **options)
    for start in range(0, len(seen), ACCUMULATION):
        for batch in seen[start : start + ACCUMULATION]:
            with autocast():
                loss = model(**batch)["loss"] / ACCUMULATION
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return outcome(optimizer, model, scaler)


def trainer(folder: Path, resume: bool) -> dict[str, Any]:
    from transformers import TrainingArguments

    from megatron01.integrations.transformers import CompressedTrainer

    def arguments(name: str, **changes: Any) -> TrainingArguments:
        given: dict[str, Any] = {
            **dict(output_dir=str(folder / name), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True),
            **dict(gradient_accumulation_steps=ACCUMULATION, learning_rate=0.02, warmup_steps=2, weight_decay=0.01),
            **dict(lr_scheduler_type="cosine", logging_steps=1, save_strategy="steps", save_steps=SAVED, bf16=not FP16),
            **dict(report_to=[], disable_tqdm=True, eval_strategy="steps", eval_steps=10, label_names=["y"]),
            **dict(save_total_limit=2),
        }
        return TrainingArguments(**{**given, **changes})

    def build(name: str, **changes: Any) -> CompressedTrainer:
        made = CompressedTrainer(
            model=Model(),
            args=arguments(name, **changes),
            train_dataset=Data(),
            eval_dataset=Data(),
            compressed_optimizer=Counted,
            compressed_arguments={"block_size": 32, "variance_kappa": 2},
        )
        made.accelerator.scaler = new_scaler()
        return made

    if resume:
        again = build("run")
        again.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{SAVED}"))
        return {"resumed": outcome(again._ours, again.model, again.accelerator.scaler)}
    whole = build("run")
    whole.train()
    ours = whole._ours
    found = {"framework": outcome(ours, whole.model, whole.accelerator.scaler)}
    logged = [entry["learning_rate"] for entry in whole.state.log_history if "learning_rate" in entry]
    found["logged"] = logged
    found["eval"] = [entry["eval_loss"] for entry in whole.state.log_history if "eval_loss" in entry]
    found["norms"] = sum("grad_norm" in entry for entry in whole.state.log_history)
    groups = [
        {"params": list(group["param_names"]), "weight_decay": group["weight_decay"]} for group in ours.param_groups
    ]
    options = {"block_size": 32, "variance_kappa": 2, "max_grad_norm": 1.0, "eps": 1e-8}
    found["bare"] = bare(whole.model.seen, groups, options, ours.schedule)
    again = build("run", save_strategy="no")
    again.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{SAVED}"))
    found["resumed"] = outcome(again._ours, again.model, again.accelerator.scaler)
    return found


def loader(rank: int, size: int) -> Any:
    sampler = torch.utils.data.DistributedSampler(Data(), size, rank, shuffle=False)
    return torch.utils.data.DataLoader(Data(), batch_size=BATCH, sampler=sampler)


def accelerate(folder: Path, resume: bool) -> dict[str, Any]:
    from accelerate import Accelerator
    from safetensors.torch import load_file

    from megatron01.integrations.accelerate import prepare

    exported = []  # sum of the replicated weights when the model was saved, and of what was saved

    def run(first: int, last: int) -> Any:
        precision = "no" if FP16 else "bf16"
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, mixed_precision=precision)
        accelerator.scaler = new_scaler()
        model = Model()
        optimizer = Counted(model.named_parameters(), SCHEDULE, **OPTIONS)
        wrapped, prepared, batches = prepare(
            accelerator, model, optimizer, torch.utils.data.DataLoader(Data(), batch_size=BATCH)
        )
        if first:
            accelerator.load_state(str(folder / "state"))
            batches = accelerator.skip_first_batches(batches, first * ACCUMULATION)
        for batch in batches:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(**batch)["loss"])
                prepared.step()
                prepared.zero_grad()
            if accelerator.sync_gradients and optimizer.step_count == SAVED and not first:
                accelerator.save_state(str(folder / "state"))
            if accelerator.sync_gradients and optimizer.step_count == SAVED - 1 and not first:
                accelerator.save_model(wrapped, str(folder / "model"))
                accelerator.wait_for_everyone()
                exported.append(outcome(optimizer, model, accelerator.scaler)["weights"])
            if optimizer.step_count == last:
                break
        return model, outcome(optimizer, model, accelerator.scaler)

    model, framework = run(0, STEPS)
    found = {"framework": framework, "bare": bare(model.seen, None, OPTIONS, SCHEDULE)}
    saved = load_file(folder / "model" / "model.safetensors")
    exported.append(float(sum(saved[name].double().sum() for name in model.state_dict())))
    return {**found, "exported": exported[-2:], "resumed": run(SAVED, STEPS)[1]}


def lightning(folder: Path, resume: bool) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.plugins import MixedPrecision

    from megatron01.integrations.lightning import CompressedDDP

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val", self.model(**batch)["loss"], sync_dist=True)

        def test_step(self, batch: Any, _: int) -> None:
            self.log("test", sum(p.double().sum() for p in self.parameters()))

        def configure_optimizers(self) -> Any:
            optimizer = Counted(self.model.named_parameters(), SCHEDULE, **OPTIONS)
            return [optimizer], [{"scheduler": ShownSchedule(optimizer), "interval": "step"}]

    def run(name: str, checkpoint: str | None) -> Any:
        scaler = new_scaler()
        arithmetic: dict[str, Any] = {"precision": "bf16-mixed"}
        if FP16:
            arithmetic = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
        often: dict[str, Any] = {"every_n_train_steps": SAVED, "save_top_k": -1, "save_last": "link"}
        module, saves = Module(), ModelCheckpoint(folder / "saved", "{step}", **often)
        fitting = pl.Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=CompressedDDP(),
            max_steps=STEPS,
            accumulate_grad_batches=ACCUMULATION,
            **arithmetic,
            callbacks=[saves, LearningRateMonitor("step")],
            logger=CSVLogger(folder, name=name),
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=2,
            limit_train_batches=EPOCH * ACCUMULATION,
        )
        loaders = [torch.utils.data.DataLoader(Data(), batch_size=BATCH) for _ in range(2)]
        fitting.fit(module, *loaders, ckpt_path=checkpoint)
        return module, outcome(module.optimizers(use_pl_optimizer=False), module.model, scaler), fitting

    module, framework, fitting = run("whole", None)
    model = module.model
    found: dict[str, Any] = {"framework": framework}
    found["val"] = float(fitting.callback_metrics["val"])
    lines = [line.split(",") for line in (folder / "whole" / "version_0" / "metrics.csv").read_text().splitlines()]
    found["logged"] = [float(line[1]) for line in lines[1:] if line[1]][ACCUMULATION - 1 :: ACCUMULATION]
    found["bare"] = bare(model.seen, None, OPTIONS, SCHEDULE)
    found["resumed"] = run("again", str(folder / "saved" / "last.ckpt"))[1]
    # a checkpoint is tested with its own weights, although the optimizer is there still
    saved = str(folder / "saved" / f"step={SAVED}.ckpt")
    weights = torch.load(saved, weights_only=True)["state_dict"]
    tests = torch.utils.data.DataLoader(Data(), batch_size=BATCH)
    found["saved"] = float(sum(weights[name].double().sum() for name, _ in module.named_parameters()))
    found["tests"] = [fitting.test(module, tests, ckpt_path=saved, verbose=False)[0]["test"]]
    found["untouched"] = all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    module.load_state_dict(weights)
    found["tests"] += [fitting.test(module, tests, verbose=False)[0]["test"]]
    return found


def fabric(folder: Path, resume: bool) -> dict[str, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    from megatron01.integrations.lightning import CompressedFabricDDP

    def run(first: int) -> Any:
        scaler = new_scaler()
        arithmetic: dict[str, Any] = {"precision": "bf16-mixed"}
        if FP16:
            arithmetic = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
        devices = int(os.environ["WORLD_SIZE"])
        connected = Fabric(accelerator="cpu", devices=devices, strategy=CompressedFabricDDP(), **arithmetic)
        connected.launch()
        model = Model()
        optimizer = Counted(model.named_parameters(), SCHEDULE, **OPTIONS)
        wrapped, prepared = connected.setup(model, optimizer)
        batches = connected.setup_dataloaders(torch.utils.data.DataLoader(Data(), batch_size=BATCH))
        if first:
            connected.load(folder / "state.ckpt", {"model": wrapped, "optimizer": prepared})
        for number, batch in enumerate(batches):
            if number < first * ACCUMULATION:
                continue
            complete = (number + 1) % ACCUMULATION == 0
            with connected.no_backward_sync(wrapped, enabled=not complete):
                connected.backward(wrapped(**batch)["loss"] / ACCUMULATION)
            if complete:
                prepared.step()
                prepared.zero_grad()
                if optimizer.step_count == SAVED and not first:
                    connected.save(folder / "state.ckpt", {"model": wrapped, "optimizer": prepared})
        return model, outcome(optimizer, model, scaler)

    model, framework = run(0)
    found = {"framework": framework, "bare": bare(model.seen, None, OPTIONS, SCHEDULE)}
    return {**found, "resumed": run(SAVED)[1]}


if __name__ == "__main__":
    name, place = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    result = {"trainer": trainer, "accelerate": accelerate, "lightning": lightning, "fabric": fabric}[name](
        place, "resume" in sys.argv
    )
    if os.environ["RANK"] == "0":
        print("RESULT " + json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
