"""Shared by all integrations: state of every replica in a folder, read-only schedulers, version checks."""

from __future__ import annotations

import os
import re
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron01.comm import ErrorPlace
from megatron01.errors import UserError
from megatron01.optim.base import FlatOptimizer
from megatron01.optim.safety import check_state_dict, error_key, keep_gradients_local, moved_errors
from megatron01.utils.files import flush_to_disk, writing

MARKER = "megatron01_state"
"""Key of the marker that frameworks save in place of an optimizer's state, which is in one file per replica."""
ValueT = TypeVar("ValueT")
_FILE = re.compile(r"replica_(\d+)_of_(\d+)\.pt")


def require_version(package: str, lowest: str, below: str) -> None:
    """Check that a framework is installed, in a supported version.

    Raises UserError if it is not; names the supported versions.
    """
    expected = f"{package}>={lowest},<{below}"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise UserError(f"{package} is not installed; expected {expected}: pip install '{expected}'") from None
    if not _numbers(lowest) <= _numbers(found) < _numbers(below):
        raise UserError(f"{package} is {found}; supported are {expected}: pip install '{expected}'")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def find_optimizer(value: Any) -> FlatOptimizer | None:
    """The optimizer of this package inside a framework's wrappers; None if ``value`` is anything else."""
    found = None
    while isinstance(value, torch.optim.Optimizer):  # not a scheduler, which has one too
        if isinstance(value, FlatOptimizer):
            found = value  # or a wrapper that a framework derived from the optimizer's class
        value = getattr(value, "_optimizer", None) or getattr(value, "optimizer", None)
    return found


def keep_all_gradients_local(module: torch.nn.Module) -> None:
    """Apply ``keep_gradients_local`` to the DistributedDataParallel modules that a framework put around a model."""
    for inner in module.modules():
        if isinstance(inner, DistributedDataParallel):
            keep_gradients_local(inner)


def leave_replicated(optimizer: FlatOptimizer, model: torch.nn.Module) -> None:
    """Put the replicated weights into a model whose training has ended. The optimizer's state stays as it is."""
    with optimizer.replicated_weights():
        weights = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, replicated in zip(model.parameters(), weights, strict=True):
            parameter.copy_(replicated)


def refuse_scaled_others(optimizers: Iterable[Any], scaler: torch.amp.GradScaler | None) -> None:
    """Refuse optimizers of other packages in fp16, whose gradients are averaged, on several replicas.

    Each replica has a loss scale of its own, so a mean of their scaled gradients would be that of no loss.
    """
    if scaler is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.Optimizer) and find_optimizer(optimizer) is None:
            raise UserError(
                f"{type(optimizer).__name__} would get the mean of gradients that each replica scales by another factor"
                " in fp16; expected bf16, or an optimizer of megatron01 alone",
                scope="job",
            )


class ShownSchedule(torch.optim.lr_scheduler.LRScheduler):
    """A read-only scheduler for frameworks that require one: shows the optimizer's learning rates, and sets none.

    Args:
        optimizer: an optimizer of this package, which follows its own schedule.
    """

    def __init__(self, optimizer: Any) -> None:
        found = find_optimizer(optimizer)
        if found is None:
            raise UserError(f"the optimizer is {type(optimizer).__name__}; expected one of megatron01's")
        self.optimizer: Any = optimizer
        self._found = found
        self._shown = 0
        self.step()

    def step(self, *_: Any, **__: Any) -> None:
        """Write the next step's learning rates into the parameter groups; the optimizer uses them in any case."""
        self._shown = self._found.step_count
        self._found.show_learning_rates()

    def get_last_lr(self) -> list[float]:
        """Learning rates of the parameter groups, those of the last step until ``step`` is called."""
        rate = self._found.schedule.lr(max(self._shown, self._found.step_count - 1))
        return [float(rate * group["lr_scale"]) for group in self._found.param_groups]

    def get_lr(self) -> list[float]:
        return self.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Empty: all state is the optimizer's."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing."""


def marker(optimizer: FlatOptimizer) -> dict[str, Any]:
    """The marker that a framework saves in place of the optimizer's state."""
    return {MARKER: {"optimizer": type(optimizer).__name__, "step": optimizer.step_count}}


def save_state(optimizer: FlatOptimizer, folder: str | Path, scaler: torch.amp.GradScaler | None = None) -> None:
    """Save the state of each replica to a file of its own in ``folder``. Collective.

    To resume with another number of replicas, or other ranks on a machine, all machines must see the folder. Raises
    UserError on all replicas, if a file cannot be written.

    Args:
        scaler: torch's ``GradScaler`` of a run in fp16. Each replica has a loss scale of its own.
    """
    folder = Path(folder)
    state = optimizer.state_dict()
    places = {name: (place.ranges, place.share) for name, place in optimizer.error_places().items()}
    rank, size = state["owner"]["rank"], state["owner"]["world_size"]
    save = _gathered(uuid.uuid4().hex, optimizer)[0]  # identifies this save in all its files
    scale = None if scaler is None else scaler.state_dict()
    path = folder / f"replica_{rank}_of_{size}.pt"
    new = path.with_name(f"{path.name}.new")
    with _error_on_all_replicas(optimizer), writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        with open(new, "wb") as file:
            _write({**state, "error_places": places, "save": save, "grad_scaler": scale}, file)
        os.replace(new, path)
    with _error_on_all_replicas(optimizer), writing(folder):
        for old, _, others in _saved(folder) if rank == 0 else []:
            if others != size:
                old.unlink()


def _write(state: dict[str, Any], file: IO[bytes]) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:  # torch wraps the file's own error
        raise error.__context__ if isinstance(error.__context__, OSError) else error from error
    flush_to_disk(file)


def load_state(
    optimizer: FlatOptimizer,
    folder: str | Path,
    scaler: torch.amp.GradScaler | None = None,
    *,
    of: Mapping[str, Any] | None = None,
) -> None:
    """Load what ``save_state`` saved: bit-exactly on the same number of replicas, else the mean of their states.

    ``scaler`` gets the loss scale of its replica, or the lowest of all on a resize; unchanged if none was saved.
    Collective. Raises UserError on all replicas, if there is no state, a file is missing or damaged, files are of
    different saves (the last was interrupted), or the state does not fit.

    Args:
        of: ``marker`` of the checkpoint to which the folder belongs; the state must be of the same step.
    """
    folder = Path(folder)
    with _error_on_all_replicas(optimizer):
        state = _read_own(optimizer, folder)
    fits = all(_gathered(state is not None, optimizer))
    with _error_on_all_replicas(optimizer):
        state = state if fits else _read_average(optimizer, folder)
    assert state is not None
    if len(set(_gathered(state["save"], optimizer))) > 1:
        raise UserError(_different_saves(folder), scope="job")
    saved_at = int(state["replica"]["scalars"][0])
    if of is not None and (wanted := of.get(MARKER, {}).get("step")) != saved_at:
        raise UserError(
            f"{folder} holds the state of step {saved_at}, and its checkpoint is of step {wanted}, as the last save was"
            " interrupted or only one of them copied; resume from another checkpoint",
            scope="job",
        )
    optimizer.load_state_dict(state)
    if scaler is not None and scaler.is_enabled() and state.get("grad_scaler"):
        scaler.load_state_dict(state["grad_scaler"])


def _read_own(optimizer: FlatOptimizer, folder: Path) -> dict[str, Any] | None:
    """The state of this replica; None if the number of replicas has changed, or the buckets of the exchange."""
    own, saved = optimizer.state_dict()["owner"], _num_saved(folder)
    if own["world_size"] != saved:
        return None
    _require_files(folder, {own["rank"]}, saved)
    state = _read(folder / f"replica_{own['rank']}_of_{saved}.pt")
    return None if optimizer.owned is None and moved_errors(state, own) else state


def _read_average(optimizer: FlatOptimizer, folder: Path) -> dict[str, Any]:
    """A portable state, the mean of those of all replicas that were saved."""
    now = optimizer.state_dict()
    own, x = now["owner"], now["replicated"]["x"]
    saved = _num_saved(folder)
    if own["world_size"] != saved and optimizer.owned is not None:
        raise UserError(
            f"{folder} holds the state of {saved} processes, and this run has {own['world_size']}; expected as many, as"
            " the optimizer is sharded"
        )
    _require_files(folder, set(range(saved)), saved)
    total: dict[str, Any] = {}
    average: dict[str, torch.Tensor] = {}
    errors: dict[str, torch.Tensor] = {}
    scales: list[dict[str, Any]] = []
    averaged = list(optimizer.averaged_state())
    for rank in range(saved):
        state = _read(folder / f"replica_{rank}_of_{saved}.pt")
        total = total or state
        if state["save"] != total["save"]:
            raise UserError(_different_saves(folder))
        check_state_dict({**state, "portable": True}, own, optimizer.param_groups, x, optimizer.step_count)
        if state["replicated"]["x"].numel() != x.numel():
            raise UserError(
                f"{folder} holds the state of {saved} processes, and this run has {own['world_size']}; expected as"
                " many, and shard=True, as the saved optimizer was sharded"
            )
        scales += [state["grad_scaler"]] if state.get("grad_scaler") else []
        buffers = dict(state["replica"])
        buffers.pop("scalars")
        for name, (ranges, share) in state["error_places"].items():
            place = ErrorPlace([(first, last) for first, last in ranges], share)
            whole = errors.setdefault(error_key(name), torch.zeros_like(state["replicated"]["x"]))
            place.add(buffers.pop(name).float(), whole, own["block_size"], factor=1.0 / saved)
        for name in averaged:
            term = buffers[name].float() / saved
            average[name] = average[name] + term if name in average else term
    portable = {"average": average, "errors": errors, "scalars": total["replica"]["scalars"]}
    lowest = min(scales, key=lambda scale: float(scale["scale"]), default=None)
    return {**total, "portable": portable, "grad_scaler": lowest}


def _num_saved(folder: Path) -> int:
    """Number of replicas of the state in a folder."""
    found = _saved(folder)
    if not found:
        raise UserError(f"{folder} holds no state of replicas (replica_0_of_N.pt); expected one that save_state wrote")
    return found[0][2]


def _require_files(folder: Path, ranks: set[int], saved: int) -> None:
    """Check that a folder, of which each machine may have its own, holds the states of these ranks of ``saved``."""
    if missing := ranks - {rank for _, rank, size in _saved(folder) if size == saved}:
        raise UserError(f"{folder} lacks the state of replicas {sorted(missing)} of {saved}; copy their files there")


def _saved(folder: Path) -> list[tuple[Path, int, int]]:
    """File, rank and number of replicas of each state in a folder."""
    paths = folder.iterdir() if folder.is_dir() else ()
    matches = ((path, _FILE.fullmatch(path.name)) for path in paths)
    return sorted((path, int(match[1]), int(match[2])) for path, match in matches if match)


def _read(path: Path) -> dict[str, Any]:
    """The content of a file; verifies its checksums, which torch writes but does not check."""
    state = None
    try:
        with zipfile.ZipFile(path) as file:
            is_whole = file.testzip() is None
        if is_whole:
            state = torch.load(path, weights_only=True, map_location="cpu")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except Exception:  # a damaged file, or one of another program, can raise nearly anything
        pass
    if not isinstance(state, dict) or not {"save", "replica", "replicated"} <= set(state):
        raise UserError(
            f"{path} is damaged, or save_state did not write it; copy it again, or resume from an earlier checkpoint"
        )
    return state


def _different_saves(folder: Path) -> str:
    return (
        f"{folder} holds states of different saves, as the last one was interrupted; resume from an earlier checkpoint"
    )


@contextmanager
def _error_on_all_replicas(optimizer: FlatOptimizer) -> Iterator[None]:
    """Context manager that raises a UserError of one replica on all of them. Collective, at its end."""
    own: UserError | None = None
    try:
        yield
    except UserError as error:
        own = error
    messages = [message for message in _gathered(None if own is None else str(own), optimizer) if message is not None]
    if own is not None:
        raise own
    if messages:
        raise UserError(messages[0], scope="elsewhere")


def _gathered(value: ValueT, optimizer: FlatOptimizer) -> list[ValueT]:
    """All-gather of a picklable value from the optimizer's processes, by rank. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(optimizer.process_group)
    dist.all_gather_object(values, value, group=optimizer.process_group)
    return values
