"""Trainer, accelerate, Lightning and Fabric train to the bits of the bare loop, and send what it sends."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from megatron01 import Adam, LRSchedule, ZeroOneAdam
from megatron01.errors import UserError
from megatron01.integrations import ShownSchedule, save_state
from megatron01.integrations.common import find_optimizer, marker, require_version
from tests import programs
from tests.distributed.harness import run_ranks
from tests.programs import ROOT, TORCHRUN
from tests.tiers import slow_after

SCRIPT = ROOT / "tests" / "integration" / "framework_runs.py"
ADAM = 20 * 4 * 241  # bytes that a replica of two sends with Adam


def run(name: str, folder: Path, *arguments: str, replicas: int = 2) -> dict[str, Any]:
    """The JSON object that replica 0 prints."""
    printed = programs.run(*TORCHRUN, str(replicas), SCRIPT, name, folder, *arguments).stdout
    (line,) = (line for line in printed.splitlines() if line.startswith("RESULT "))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["accelerate", "trainer", "lightning", "fabric"])
def test_a_framework_trains_to_the_bits_of_the_bare_loop(name: str, precision: str, tmp_path: Path) -> None:
    """In fp16 some gradients overflow on one replica; each has a loss scale of its own, also after a resume."""
    found = run(name, tmp_path, precision)
    framework, bare, resumed = found["framework"], found["bare"], found["resumed"]
    assert framework == bare and framework["steps"] == 20
    assert {"full", "one_bit", "local"} <= set(framework["kinds"]) and 0 < framework["sent"] < ADAM
    assert framework["kinds"][15] in ("local", "skipped"), "the checkpoint lies between two synchronizations"
    assert (max(framework["skipped"]) > 0) == (precision == "fp16")
    assert (len(set(framework["scales"])) == 2) == (precision == "fp16")
    for key in ("fingerprint", "weights", "steps", "scales"):
        assert resumed[key] == framework[key]
    assert resumed["kinds"] == framework["kinds"][16:]
    if "logged" in found:
        assert found["logged"][:20] == pytest.approx(framework["rates"])
    if name == "accelerate":
        assert found["exported"][0] == pytest.approx(found["exported"][1], rel=1e-12)
    if name == "lightning":
        assert found["untouched"] and found["tests"] == pytest.approx([found["saved"]] * 2)
    if name == "trainer":
        assert found["norms"] == 20 and len(found["eval"]) == 2
        others = run(name, tmp_path, precision, "resume", replicas=3)["resumed"]
        assert others["steps"] == 20 and others["kinds"] == resumed["kinds"] and len(others["scales"]) == 3


def test_a_version_that_is_not_supported_says_which_are() -> None:
    with pytest.raises(UserError, match=r"transformers is .*; supported are transformers>=99,<100"):
        require_version("transformers", "99", "100")
    with pytest.raises(UserError, match="nowhere is not installed; expected nowhere>=1,<2"):
        require_version("nowhere", "1", "2")
    require_version("transformers", transformers.__version__, "99")
    with pytest.raises(UserError, match=f"supported are transformers>=1,<{transformers.__version__}"):
        require_version("transformers", "1", transformers.__version__)


def test_an_optimizer_of_another_package_is_found_and_its_scheduler_is_none() -> None:
    from lightning.pytorch.core.optimizer import LightningOptimizer

    class Own(ZeroOneAdam):
        """Neither of this package nor wrapped."""

    optimizer = Own([torch.nn.Parameter(torch.zeros(2))], LRSchedule(style="constant", peak_lr=0.1, total_steps=1))
    assert find_optimizer(optimizer) is find_optimizer(LightningOptimizer(optimizer)) is optimizer
    assert find_optimizer(ShownSchedule(optimizer)) is None
    assert find_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)) is None


def test_a_shown_schedule_has_the_rates_of_the_last_step_until_it_is_stepped() -> None:
    schedule, weights = LRSchedule(style="linear", peak_lr=1.0, total_steps=10), torch.nn.Parameter(torch.zeros(2))
    optimizer = ZeroOneAdam([{"params": [weights], "lr_scale": 0.5}], schedule)

    def train() -> None:
        weights.grad = torch.ones(2)
        optimizer.step()

    rates = [[0.5 * schedule.lr(step)] for step in range(5)]
    shown = ShownSchedule(optimizer)
    assert shown.get_last_lr() == rates[0]
    train()
    assert shown.get_last_lr() == rates[0]
    shown.step()
    assert shown.get_last_lr() == rates[1]
    for _ in range(2):
        train()
    assert shown.get_last_lr() == rates[2]


@pytest.mark.parametrize("enabled", ["is_deepspeed_enabled", "is_fsdp_enabled"])
def test_a_trainer_whose_backend_exchanges_gradients_is_refused(
    enabled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron01.integrations.transformers import CompressedTrainer

    create = transformers.Trainer.create_accelerator_and_postprocess

    def create_another(self: Any) -> None:
        create(self)
        setattr(self, enabled, True)

    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", create_another)
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(UserError, match="uses DeepSpeed or FSDP, which exchange gradients; expected neither"):
        CompressedTrainer(torch.nn.Linear(1, 1), arguments)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM"])
def test_an_accelerator_whose_backend_exchanges_gradients_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from megatron01.integrations.accelerate import prepare

    accelerator, layer = Accelerator(cpu=True), torch.nn.Linear(2, 2)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType[kind])
    with pytest.raises(UserError, match=f"this accelerator uses {kind}, which exchanges gradients; expected"):
        prepare(accelerator, layer, ZeroOneAdam(layer.parameters(), 0.1))


@pytest.mark.parametrize("kind", [Adam, torch.optim.AdamW, "zero_one_adam"])
def test_a_trainer_takes_a_class_that_compresses(kind: Any, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from megatron01.integrations.transformers import CompressedTrainer

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(UserError, match=r"compressed_optimizer is .*expected a class such as megatron01\.ZeroOneAdam"):
        CompressedTrainer(torch.nn.Linear(1, 1), arguments, compressed_optimizer=kind)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"compressed_arguments": {"weight_decay": 0.1}}, "compressed_arguments has weight_decay, which TrainingArg"),
        ({"compressed_arguments": {"schedule": 0.1}}, "compressed_arguments has schedule, which TrainingArguments"),
        ({"compressed_arguments": ["block_size"]}, r"compressed_arguments is \['block_size'\]; expected a dict"),
        ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}, "optimizer_cls_and_kwargs gives the Trainer a SGD"),
        ({"optimizers": (torch.optim.SGD([torch.zeros(1)], 0.1), None)}, "optimizers gives the Trainer a SGD"),
        ({"optimizers": (None, object())}, "optimizers gives the Trainer a scheduler"),
    ],
)
def test_arguments_of_a_trainer_that_would_change_nothing_are_refused(given: Any, words: str, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from megatron01.integrations.transformers import CompressedTrainer

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(UserError, match=words):
        CompressedTrainer(torch.nn.Linear(1, 1), arguments, **given)


def test_the_optimizer_of_a_trainer_follows_its_arguments(tmp_path: Path) -> None:
    """As AdamW would in a Trainer; ``compressed_arguments`` win, and 0 is no clipping."""
    from megatron01.integrations.transformers import CompressedTrainer

    class Recorded(ZeroOneAdam):
        def __init__(self, params: Any, schedule: Any, *, betas: Any, **given: Any) -> None:
            self.given = {"betas": betas, **given}
            super().__init__(params, schedule, betas=betas, **given)

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
    model[2].weight.requires_grad_(False)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], learning_rate=0.02, warmup_steps=0.3, weight_decay=0.3,
        lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 0.01}, max_grad_norm=0.0,
        adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-5,
    )  # fmt: skip
    own: dict[str, Any] = {"betas": (0.7, 0.9)}
    trainer = CompressedTrainer(model=model, args=arguments, compressed_optimizer=Recorded, compressed_arguments=own)
    trainer._num_training_steps = 10
    ours: Any = trainer.create_optimizer()
    usual = transformers.Trainer(model=model, args=arguments)
    usual.create_optimizer_and_scheduler(10)
    theirs: Any = usual.optimizer

    def decays(optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, float]:
        return {weights: group["weight_decay"] for group in optimizer.param_groups for weights in group["params"]}

    assert decays(ours) == decays(theirs) and set(decays(ours).values()) == {0.0, 0.3}
    assert ours.given == {"betas": (0.7, 0.9), "eps": 1e-5, "max_grad_norm": None}
    for step in range(10):
        assert ours.schedule.lr(step) == pytest.approx(theirs.param_groups[0]["lr"])
        theirs.step()
        usual.lr_scheduler.step()


def test_fabric_loads_a_model_as_strictly_as_it_is_told(tmp_path: Path) -> None:
    from megatron01.integrations.lightning import CompressedFabricDDP

    model = torch.nn.Linear(2, 2)
    optimizer = ZeroOneAdam(model.named_parameters(), LRSchedule(style="constant", peak_lr=0.1, total_steps=1))
    torch.save({"model": {"weight": model.weight.detach()}, "epoch": 3}, tmp_path / "state.ckpt")
    save_state(optimizer, tmp_path / "state.ckpt.replicas")
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    with pytest.raises(RuntimeError, match="bias"):
        CompressedFabricDDP().load_checkpoint(tmp_path / "state.ckpt", state)
    assert CompressedFabricDDP().load_checkpoint(tmp_path / "state.ckpt", state, strict=False) == {}
    assert state["epoch"] == 3


def test_lightning_removes_the_state_of_replicas_with_its_checkpoint(tmp_path: Path) -> None:
    """Else all states of a run would fill the disk."""
    from megatron01.integrations.lightning import CompressedDDP

    (tmp_path / "old.ckpt").touch()
    (tmp_path / "old.ckpt.replicas").mkdir()
    (tmp_path / "old.ckpt.replicas" / "replica_0_of_1.pt").touch()
    CompressedDDP().remove_checkpoint(tmp_path / "old.ckpt")
    assert not list(tmp_path.iterdir())


def test_lightning_saves_weights_alone_without_the_state_of_replicas(tmp_path: Path) -> None:
    from megatron01.integrations.lightning import CompressedDDP

    strategy = CompressedDDP()
    strategy.optimizers = [ZeroOneAdam(torch.nn.Linear(2, 2).parameters(), 0.1)]
    strategy.save_checkpoint({"state_dict": {}}, tmp_path / "weights.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["weights.ckpt"]


def test_a_state_of_another_step_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    """As after a save that replaced the state and was killed before it replaced the checkpoint itself."""
    from accelerate import Accelerator

    from megatron01.integrations.accelerate import prepare
    from megatron01.integrations.lightning import CompressedDDP, CompressedFabricDDP

    layer, path, strategy = torch.nn.Linear(2, 2), tmp_path / "last.ckpt", CompressedDDP()
    optimizer = ZeroOneAdam(layer.parameters(), 0.1)
    accelerator = Accelerator(cpu=True)
    prepare(accelerator, layer, optimizer)
    accelerator.save_state(str(tmp_path / "state"))
    torch.save({"optimizer": marker(optimizer)}, path)
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    link = tmp_path / "link.ckpt"  # as of save_last="link"
    link.symlink_to(path)
    strategy.optimizers, strategy._loaded_from = [optimizer], link
    for folder in (f"{path}.replicas", tmp_path / "state" / "replicas"):
        save_state(optimizer, folder)
    for load in (
        lambda: accelerator.load_state(str(tmp_path / "state")),
        lambda: strategy.load_optimizer_state_dict({"optimizer_states": [torch.load(path)["optimizer"]]}),
        lambda: CompressedFabricDDP().load_checkpoint(link, {"optimizer": optimizer}),
    ):
        with pytest.raises(UserError, match=r"replicas holds the state of step 1, and its checkpoint is of step 0"):
            load()


def test_each_training_of_a_trainer_has_a_schedule_of_its_own(tmp_path: Path) -> None:
    """The first one's has ended: a second training would go on at its last learning rate, which is nearly 0."""
    from transformers import TrainingArguments

    from megatron01.integrations.transformers import CompressedTrainer
    from tests.integration.framework_runs import Data, Model

    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=4, learning_rate=0.02, use_cpu=True, report_to=[])
    trainer = CompressedTrainer(model=Model(), args=arguments, train_dataset=Data())
    for _ in range(2):
        trainer.train()
        assert trainer._ours is not None and trainer._ours.step_count == 4
    kept = ZeroOneAdam(Model().parameters(), 0.1)
    trainer = CompressedTrainer(model=Model(), args=arguments, train_dataset=Data(), optimizers=(kept, None))
    trainer._num_training_steps = 4
    assert trainer.create_optimizer() is kept


def test_a_trainer_keeps_the_best_weights_that_it_has_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later evaluations do not put the last ones in their place."""
    from transformers import TrainingArguments

    from megatron01.integrations.transformers import CompressedTrainer
    from tests.integration.framework_runs import Data, Model

    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, learning_rate=0.02, use_cpu=True, report_to=[], label_names=["y"]
    )
    trainer = CompressedTrainer(model=Model(), args=arguments, train_dataset=Data(), eval_dataset=Data())
    trainer.train()
    best = Model()
    monkeypatch.setattr(
        transformers.Trainer, "_load_best_model", lambda self: self.model.load_state_dict(best.state_dict())
    )
    trainer._load_best_model()
    trainer.evaluate()
    for name, weights in trainer.model.state_dict().items():
        assert torch.equal(weights, best.state_dict()[name]), name


def test_a_trained_model_is_evaluated_and_saved_in_sixteen_bit(tmp_path: Path) -> None:
    """transformers casts the model for such an evaluation and leaves it so; its weights are then no more the
    optimizer's."""
    from transformers import TrainingArguments

    from megatron01.integrations.transformers import CompressedTrainer
    from tests.integration.framework_runs import Data, Model

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, learning_rate=0.02, use_cpu=True, report_to=[], bf16=True,
        bf16_full_eval=True, label_names=["y"],
    )  # fmt: skip
    trainer = CompressedTrainer(model=Model(), args=arguments, train_dataset=Data(), eval_dataset=Data())
    trainer.train()
    expected = {name: weight.bfloat16() for name, weight in trainer.model.state_dict().items()}
    assert trainer.evaluate() and trainer.predict(Data()).metrics
    trainer.save_model()
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in expected.items())


def trained(rank: int, size: int, folder: Path) -> list[bool]:
    """Whether the model of a Trainer that stopped early has the master weights: at its end, later, once evaluated."""
    from transformers import TrainerCallback, TrainingArguments

    from megatron01.integrations.transformers import CompressedTrainer
    from tests.integration.framework_runs import Data, Model

    same = []

    class Callback(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_training_stop = state.global_step == 9  # the last planned step would synchronize

        def on_train_end(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
            compare(model)

    def compare(model: torch.nn.Module) -> None:
        masters, named = trainer._ours.master_parameters(), dict(model.named_parameters())
        same.append(all(torch.equal(named[name], master) for name, master in masters.items()))

    trainer: Any = CompressedTrainer(
        model=Model(),
        args=TrainingArguments(str(folder), max_steps=20, learning_rate=0.02, use_cpu=True, report_to=[]),
        train_dataset=Data(),
        eval_dataset=Data(),
        callbacks=[Callback()],
        compressed_arguments={"sync_policy": "doubling:2,1", "block_size": 32},
    )
    trainer.train()
    assert trainer._ours.last_step.kind == "local"
    compare(trainer.model)
    with trainer._ours.replicated_weights():
        pass  # it restores the weights of this replica
    trainer.evaluate()
    compare(trainer.model)
    return same


def test_the_model_of_a_trainer_that_stops_early_has_the_replicated_weights(tmp_path: Path) -> None:
    """``trainer.model.save_pretrained()`` would save the weights of replica 0 alone."""
    assert run_ranks(trained, 1, tmp_path, default_group=False) == [[True] * 3]


def validated(rank: int, size: int, folder: Path) -> bool:
    """Whether a checkpoint that Lightning saves at a validation between two synchronizations has the master weights."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from megatron01.integrations.lightning import CompressedDDP

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # of a part of the model, as adapters have it
            found = super().state_dict(*args, **kwargs)
            return {key: value for key, value in found.items() if key != "layer.bias"}

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch).square().mean()

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("loss", self.layer(batch).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return ZeroOneAdam(self.named_parameters(), 0.02, sync_policy="doubling:2,1", block_size=32)

    fitting = pl.Trainer(
        accelerator="cpu",
        strategy=CompressedDDP(),
        max_steps=9,
        val_check_interval=9,
        limit_val_batches=1,
        callbacks=[ModelCheckpoint(folder, "best", monitor="loss")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, loaders = Module(), [torch.utils.data.DataLoader(torch.ones(64, 8)) for _ in range(2)]
    fitting.fit(module, *loaders)
    optimizer: Any = module.optimizers(use_pl_optimizer=False)
    assert optimizer.last_step.kind == "local"
    weights = torch.load(folder / "best.ckpt", weights_only=True)["state_dict"]
    masters, after = optimizer.master_parameters(), dict(module.named_parameters())
    return all(torch.equal(after[name], masters[name]) for name in masters) and all(
        torch.equal(weight, masters[name]) for name, weight in weights.items()
    )


def test_a_checkpoint_of_a_validation_has_the_replicated_weights(tmp_path: Path) -> None:
    assert run_ranks(validated, 1, tmp_path, default_group=False) == [True]


def interrupted(rank: int, size: int, folder: Path, alone: bool) -> None:
    """Writes what comes out on this rank where the last one, or all, raise an error that is to save a checkpoint."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from megatron01.integrations import lightning

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            if number == 6 and (rank == size - 1 or not alone):
                raise ValueError(f"a bad batch on rank {rank}")
            return self.layer(batch * (1.0 + rank)).square().mean()

        def configure_optimizers(self) -> Any:
            return ZeroOneAdam(self.named_parameters(), 0.02, sync_policy="every", block_size=32)

    lightning._SECONDS_ON_EXCEPTION = 1.0 if alone else 60.0
    trainer = pl.Trainer(
        accelerator="cpu", devices=size, strategy=lightning.CompressedDDP(), max_steps=9, logger=False,
        callbacks=[ModelCheckpoint(folder, "last", save_on_exception=True, save_top_k=0)],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(64, 8)))
    except (ValueError, RuntimeError) as error:
        (folder / f"{rank}.txt").write_text("\n".join([str(error), *getattr(error, "__notes__", [])]))
        raise


@pytest.mark.parametrize("alone", slow_after(1, [True, False]))
def test_a_checkpoint_on_an_error_of_one_replica_does_not_hang(alone: bool, tmp_path: Path) -> None:
    """Saving is collective, and the others wait in an exchange; where all have the error, they save."""
    run_ranks(interrupted, 2, tmp_path, alone, default_group=False, may_die=(0, 1), timeout=60.0)
    other, own = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert own.startswith("a bad batch on rank 1")
    if alone:
        assert "No checkpoint is saved on this error, as only 1 of 2 replicas could" in own
        assert "did not come to an exchange" in other and not list(tmp_path.glob("*.ckpt*"))
    else:
        assert "No checkpoint" not in other + own
        assert (tmp_path / "last.ckpt").is_file() and len(list((tmp_path / "last.ckpt.replicas").iterdir())) == 2


@pytest.mark.parametrize("place", ["trainer", "module"])
def test_lightning_does_not_clip_a_replicas_own_gradient(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by its Trainer's setting nor by ``clip_gradients`` in a module; another optimizer's may be clipped."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import DDPStrategy

    from megatron01.integrations.lightning import CompressedDDP

    monkeypatch.setattr(DDPStrategy, "setup", lambda self, trainer: None)
    strategy, module, layer = CompressedDDP(precision_plugin=Precision()), pl.LightningModule(), torch.nn.Linear(2, 2)
    ours, other = ZeroOneAdam([layer.weight], 0.1), torch.optim.SGD([layer.bias], 0.1)
    strategy.optimizers = [ours, other]
    given: Any = 0.5 if place == "trainer" else None
    trainer: Any = SimpleNamespace(gradient_clip_val=given, gradient_clip_algorithm=None, strategy=strategy)
    trainer.precision_plugin = strategy.precision_plugin
    module.trainer = trainer
    strategy.setup(trainer)
    layer.bias.grad = torch.tensor([3.0, 4.0])
    value = None if place == "trainer" else 0.5
    module.clip_gradients(other, value, "norm")
    assert float(layer.bias.grad.norm()) == pytest.approx(0.5)
    with pytest.raises(UserError, match=r"gradient_clip_val is 0\.5, which would clip each replica's own gradient"):
        module.clip_gradients(ours, value, "norm")
    trainer.gradient_clip_val = None
    module.clip_gradients(ours)


def two_optimizers() -> list[ZeroOneAdam]:
    return [ZeroOneAdam(torch.nn.Linear(2, 2).parameters(), 0.1) for _ in range(2)]


def test_a_second_optimizer_whose_state_would_replace_the_first_ones_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from accelerate import Accelerator
    from lightning.pytorch.strategies import DDPStrategy

    from megatron01.integrations.accelerate import prepare
    from megatron01.integrations.lightning import CompressedDDP

    accelerator, (one, other) = Accelerator(cpu=True), two_optimizers()
    prepare(accelerator, one)
    for again in (other, one, accelerator._optimizers[0]):
        with pytest.raises(UserError, match="has an optimizer of megatron01 already"):
            prepare(accelerator, again)
    accelerator.free_memory()
    accelerator.scaler = torch.amp.GradScaler("cpu")
    prepare(accelerator, other)  # as after a first try with too large a batch
    accelerator.free_memory()
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    prepare(accelerator, one)

    monkeypatch.setattr(DDPStrategy, "setup", lambda self, trainer: None)
    strategy = CompressedDDP()
    strategy.optimizers = two_optimizers()
    with pytest.raises(UserError, match="configure_optimizers returned 2 optimizers of megatron01"):
        strategy.setup(SimpleNamespace())


def test_accelerate_gets_one_optimizer_and_clips_none_of_its_gradients() -> None:
    from accelerate import Accelerator

    from megatron01.integrations.accelerate import prepare

    accelerator, pair = Accelerator(cpu=True), two_optimizers()
    for given in ([], pair):
        with pytest.raises(UserError, match=rf"prepare got {len(given)} optimizers of megatron01; expected one"):
            prepare(accelerator, *given)
    prepare(accelerator, pair[0])
    for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
        with pytest.raises(UserError, match="give the optimizer max_grad_norm instead"):
            clip([torch.zeros(1)], 1.0)


def beside_another_in_fp16(rank: int, size: int) -> list[str]:
    from accelerate import Accelerator
    from lightning.pytorch.strategies import DDPStrategy

    from megatron01.integrations.accelerate import prepare
    from megatron01.integrations.lightning import CompressedDDP, CompressedFabricDDP

    layer = torch.nn.Linear(2, 2)
    pair = [ZeroOneAdam([layer.weight], 0.1), torch.optim.AdamW([layer.bias])]
    accelerator, fabric, lightning = Accelerator(cpu=True), CompressedFabricDDP(), CompressedDDP()
    accelerator.scaler = torch.amp.GradScaler("cpu")
    fabric._precision = lightning._precision_plugin = SimpleNamespace(scaler=accelerator.scaler)
    lightning.optimizers = pair
    fabric.setup_optimizer(pair[0])
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDPStrategy, "setup", lambda self, trainer: None)
        for refused in (
            lambda: prepare(accelerator, layer, *pair),
            lambda: fabric.setup_optimizer(pair[1]),
            lambda: lightning.setup(SimpleNamespace()),
        ):
            with pytest.raises(UserError) as error:
                refused()
            told.append(str(error.value))
    return told


def test_an_optimizer_of_another_package_beside_it_is_refused_in_fp16() -> None:
    """Each replica's loss scale is its own, so the mean of the other optimizer's scaled gradients would be wrong."""
    for told in run_ranks(beside_another_in_fp16, 2):
        assert len(told) == 3 and all(text.startswith("AdamW would get the mean") for text in told)


def local_gradient(rank: int, size: int) -> float:
    """The gradient of a replica whose model accelerate has wrapped."""
    from accelerate import Accelerator

    from megatron01.integrations.accelerate import prepare

    layer = torch.nn.Linear(1, 1, bias=False)
    wrapped, _ = prepare(Accelerator(cpu=True), layer, ZeroOneAdam(layer.parameters(), 0.1))
    assert isinstance(wrapped, DistributedDataParallel)
    wrapped(torch.full((1,), 1.0 + rank)).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.item()


def test_gradients_of_a_wrapped_model_stay_local() -> None:
    assert run_ranks(local_gradient, 2) == [1.0, 2.0]


def test_lightning_has_no_replicated_weights_once_training_has_ended() -> None:
    """The model may then hold those of a checkpoint, and is saved with them."""
    from megatron01.integrations.lightning import CompressedDDP

    strategy, optimizer = CompressedDDP(), ZeroOneAdam(torch.nn.Linear(2, 2).parameters(), 0.1)
    strategy.optimizers = [optimizer]
    for fn, finished, expected in (("fit", False, optimizer), ("fit", True, None), ("validate", False, None)):
        state = SimpleNamespace(fn=fn, finished=finished)
        strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(state=state))
        assert strategy._training is expected


@pytest.mark.slow
@pytest.mark.parametrize("script", ["transformers_trainer", "accelerate_loop", "lightning_trainer", "fabric_loop"])
def test_the_examples_learn(script: str, tmp_path: Path) -> None:
    done = programs.run(*TORCHRUN, "2", ROOT / "examples" / f"{script}.py", cwd=tmp_path)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["loss"] < 4.0 and len(result["fingerprint"]) == 64  # 16 or log 64 at first
