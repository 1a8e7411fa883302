"""Damaged checkpoint folders, read by all code that reads checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron01.checkpoint.load import choose_start
from megatron01.checkpoint.manifest import TRACKER_NAME, describe_file
from megatron01.cli import COMMANDS
from megatron01.config import CheckpointConfig, DistributedConfig
from megatron01.errors import UserError
from megatron01.parallel import LaunchEnvironment, initialize
from megatron01.pretraining import GPT
from megatron01.training import Trainer, pretrain
from megatron01.training import data as data_order
from tests.distributed.harness import run_ranks
from tests.fuzz.damage import damage_file, edited
from tests.integration.tiny import gpt_config, make_corpus

SAVED = (3, 6)
TRACKERS = ["", "3", "6", "7", "-1", "99999999999999999999", "1" * 10_000, "x", "\0", "3\n6", "٣", "release", "6.0"]


class Checkpoints:
    """Two checkpoints each of one replica and of two, damaged in one place, or a file of tensors hashed again.

    With the old hashes it is refused, or gives the bits that were saved. With new hashes it may give anything.
    """

    name = "checkpoints"

    @staticmethod
    def prepare(folder: Path) -> None:
        """Write the checkpoints, in processes of their own."""
        make_corpus(folder / "corpus")
        for replicas in (1, 2):
            run_ranks(_save, replicas, folder / "corpus", folder / f"of{replicas}", default_group=replicas > 1)

    def __init__(self, folder: Path) -> None:
        corpus = folder / "corpus"
        self._whole = {replicas: folder / f"of{replicas}" for replicas in (1, 2)}
        self._closing = ExitStack()
        environment = LaunchEnvironment.read({})
        config = gpt_config(corpus, run_dir=str(folder / "run"), num_workers=0)
        group = self._closing.enter_context(initialize(environment, DistributedConfig(threads_per_replica=1)))
        functions = GPT.build_datasets, GPT.build_model, GPT.forward_step
        with contextlib.redirect_stdout(io.StringIO()):
            self._trainer = Trainer(config, environment, group, *functions)
        self._group = group
        self._expected = {
            (replicas, iteration): self._state_after(place, iteration)
            for replicas, place in self._whole.items()
            for iteration in SAVED
        }

    def round(self, numbers: random.Random, folder: Path, victim: Path) -> tuple[str, str | None]:
        """Damage a copy, and read it. Returns what was done, and the error if it was refused."""
        replicas = numbers.choice([1, 2])
        place = folder / "saved"
        shutil.copytree(self._whole[replicas], place)
        kind, sealed = _damage(place, numbers, victim)
        message = None
        for attempt in (self._list, self._verify, self._inspect):
            with contextlib.suppress(UserError), contextlib.redirect_stdout(io.StringIO()):
                attempt(place, numbers)
        try:
            found = self._resume(place, numbers)
        except UserError as error:
            message = str(error)
        else:
            iteration, state = found
            if not sealed:
                assert state == self._expected[replicas, iteration], f"iteration {iteration} has other bits"
        return kind, message

    def close(self) -> None:
        self._closing.close()

    def _list(self, place: Path, numbers: random.Random) -> None:
        COMMANDS["checkpoint"].run(["list", str(place)], "checkpoint")

    def _verify(self, place: Path, numbers: random.Random) -> None:
        COMMANDS["checkpoint"].run(["verify", str(place)], "checkpoint")

    def _inspect(self, place: Path, numbers: random.Random) -> None:
        COMMANDS["checkpoint"].run(["inspect", str(place / f"iter_{numbers.choice(SAVED):07d}")], "checkpoint")

    def _resume(self, place: Path, numbers: random.Random) -> tuple[int, str]:
        load = numbers.choice(["auto", str(place), str(place / "iter_0000006")])
        start, _ = choose_start(CheckpointConfig(save=str(place), load=load), self._group)
        if start is None:
            raise UserError("nothing is left")
        data_order.saved_progress(start)
        return start[1], self._state_after(*start)

    def _state_after(self, place: Path, iteration: int) -> str:
        """Hash of the state after a resume."""
        self._trainer.load(place, iteration)
        digest = hashlib.sha256()
        optimizer = self._trainer.optimizer
        for _, tensor in sorted((optimizer.replicated_state() | optimizer.replica_state()).items()):
            digest.update(tensor.contiguous().view(-1).numpy().tobytes())
        facts = [self._trainer.iteration, self._trainer.consumed_samples, self._trainer.meter.state_dict()]
        digest.update(json.dumps(facts, sort_keys=True).encode())
        return digest.hexdigest()


def _save(rank: int, world_size: int, corpus: Path, place: Path) -> None:
    config = gpt_config(
        corpus,
        save=str(place),
        save_interval=SAVED[0],
        train_iters=SAVED[-1],
        eval_iters=0,
        run_dir=str(place) + "-run",
    )
    pretrain(config, GPT.build_datasets, GPT.build_model, GPT.forward_step)


def _damage(place: Path, numbers: random.Random, victim: Path) -> tuple[str, bool]:
    """The description of the damage, and whether hashes were recomputed."""
    checkpoint = place / f"iter_{numbers.choices(SAVED, (1, 5))[0]:07d}"
    files = sorted(path for path in checkpoint.iterdir())
    what = numbers.choice(["file"] * 4 + ["metadata"] * 4 + ["sealed file"] * 2 + ["tracker"] * 2 + ["settings"])
    if what == "tracker":
        tracker = place / TRACKER_NAME
        if numbers.random() < 0.5:
            tracker.write_text(numbers.choice(TRACKERS))
            return "tracker, text", False
        return f"tracker, {damage_file(tracker, files, numbers, victim)}", True  # may be of another checkpoint now
    if what == "metadata":
        path = checkpoint / "metadata.json"
        path.write_text(json.dumps(edited(json.loads(path.read_text()), numbers)))
        return "metadata", False
    if what == "settings":
        (checkpoint / "config.yaml").write_text(numbers.choice(SETTINGS))
        _seal(checkpoint)
        return "settings, sealed", True
    path = numbers.choice(files)
    others = [file for file in sorted(place.glob("iter_*/*")) if file != path]
    kind = damage_file(path, others, numbers, victim)
    if what == "file":
        return kind, False
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError, TypeError):
        _seal(checkpoint)
    return f"{kind}, sealed", True


SETTINGS = [
    "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
    "[" * 10_000,
    "- " * 2_000,
    "!!python/object/apply:os.mkdir [made]",
    "optimizer: [1, 2]\n",
    "optimizer: {lr: {a: b}}\n",
    "? [a]\n: b\n",
    "x: " + "1:" * 20_000 + "1",
    "",
    "\ufeff",
]


def _seal(checkpoint: Path) -> None:
    path = checkpoint / "metadata.json"
    if path.is_symlink() or not path.is_file():
        return
    entries = json.loads(path.read_text())
    for name in entries["files"]:
        stored = describe_file(checkpoint / name)
        entries["files"][name] = {"bytes": stored.bytes, "sha256": stored.sha256}
    path.write_text(json.dumps(_with_hash(entries)))


def _with_hash(entries: dict[str, Any]) -> dict[str, Any]:
    entries.pop("content_hash", None)
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    return entries | {"content_hash": digest}
