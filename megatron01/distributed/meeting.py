"""How the processes of a job meet: each announces itself in the store, and rank 0 tells all whether they fit together.

It takes a store alone, so that what would break the connections between the processes is found before they are made.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

import megatron01
from megatron01.distributed.environment import LaunchEnvironment
from megatron01.errors import FaultError, UserError

_GRACE = datetime.timedelta(seconds=15)
"""After the time-out, until rank 0 has said who is missing, and everybody has heard it."""


@dataclass(frozen=True)
class Announcement:
    """What a process tells of itself.

    Attributes:
        node: the name of its machine.
        gpu: a name that no other GPU of the job has; empty without one.
        versions: by name; they must be equal everywhere, as replicas compute the same bits.
        facts: other things that must be equal, by name: short texts.
    """

    node: str
    gpu: str
    versions: dict[str, str]
    facts: dict[str, str]


def own_versions() -> dict[str, str]:
    """Of what decides about the bits that a replica computes."""
    try:
        own = metadata.version("megatron01")
    except metadata.PackageNotFoundError:
        own = "not installed"
    return {
        "megatron01": f"{own} ({_digest_of_sources()})",
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def _digest_of_sources() -> str:
    """Tells two states of this package apart, of which both may call themselves by the same version."""
    package = Path(megatron01.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def meet(
    store: dist.Store,
    environment: LaunchEnvironment,
    own: Announcement,
    timeout: datetime.timedelta,
    *,
    needs_gpus: bool = True,
) -> bool:
    """Waits until all processes have announced themselves.

    Args:
        store: that all of them reach.
        own: what this one tells.
        timeout: for the others to come.
        needs_gpus: a node without GPU is a mistake where others have some.

    Returns:
        Whether each has a GPU of its own, the same on all processes.

    Raises:
        FaultError: on every process that came, if some did not.
        UserError: on every process, if they do not fit together. The first one that differs is named.
    """
    ranks = range(environment.world_size)
    store.set(f"announced/{environment.rank}", json.dumps(asdict(own)))
    if environment.rank == 0:
        keys = [f"announced/{rank}" for rank in ranks]
        with suppress(dist.DistStoreError):
            store.wait(keys, timeout)
        present = [rank for rank in ranks if store.check([keys[rank]])]
        announced = {rank: Announcement(**json.loads(store.get(keys[rank]))) for rank in present}
        error = _missing(announced, environment, timeout) or _misfit(announced, needs_gpus)
        all_have_gpus = each_has_its_own([one.gpu for one in announced.values()])
        verdict = json.dumps([error, len(present) < len(ranks), all_have_gpus])
        store.set("verdict", verdict)
        # it may serve the store: nobody is to be cut off from the answer when it leaves with an error
        with suppress(dist.DistStoreError):
            store.wait([f"informed/{rank}" for rank in present if rank != 0], _GRACE)
    else:
        store.wait(["verdict"], timeout + _GRACE)
        verdict = store.get("verdict").decode()
        store.set(f"informed/{environment.rank}", "")
    error, is_fault, all_have_gpus = json.loads(verdict)
    if error is not None:
        raise (FaultError if is_fault else UserError)(error, scope="job")
    return bool(all_have_gpus)


def each_has_its_own(gpus: Sequence[str]) -> bool:
    """Whether every replica's GPU is named and nobody else's."""
    return all(gpus) and len(set(gpus)) == len(gpus)


def in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 8-15, 20``: the first few stretches of them."""
    stretches: list[list[int]] = []
    for rank in sorted(ranks):
        if stretches and rank == stretches[-1][-1] + 1:
            stretches[-1][-1:] = [rank] if len(stretches[-1]) == 2 else [stretches[-1][-1], rank]
        else:
            stretches.append([rank])
    shown = ", ".join("-".join(map(str, stretch)) for stretch in stretches[:8])
    more = " and more" if len(stretches) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _missing(
    announced: Mapping[int, Announcement], environment: LaunchEnvironment, timeout: datetime.timedelta
) -> str | None:
    missing = [rank for rank in range(environment.world_size) if rank not in announced]
    if not missing:
        return None
    came = list(dict.fromkeys(one.node for one in announced.values()))
    absent = [node for node in environment.nodes if node not in came]
    named = f" (nobody came from {', '.join(absent[:8])})" if absent else f" ({', '.join(came[:8])} came)"
    return (
        f"the {environment.world_size} replicas did not meet at {environment.meeting_place} (rank 0's machine) within"
        f" {timeout.total_seconds() / 60:g} minutes: no sign of {in_words(missing)}{named}; see that all were started"
        " and that MASTER_ADDR and MASTER_PORT can be reached from there"
    )


def _misfit(announced: Mapping[int, Announcement], needs_gpus: bool) -> str | None:
    """What keeps these processes from working together; None if nothing does."""
    first = announced[0]
    for rank, other in announced.items():
        place, here = f"{other.node} (rank {rank})", f"{first.node} (rank 0)"
        for name, version in first.versions.items():
            if other.versions.get(name) != version:
                return (
                    f"{place} has {name} {other.versions.get(name)}, but {here} has {version}; install the same"
                    " version on every node"
                )
        for name, value in first.facts.items():
            if other.facts.get(name) != value:
                return (
                    f"{place} differs from {here} in {name} ({other.facts.get(name)} and {value}); start all replicas"
                    " with the same program, settings and files"
                )
    without = [rank for rank, one in announced.items() if not one.gpu]
    if needs_gpus and without and len(without) < len(announced):
        nodes = list(dict.fromkeys(announced[rank].node for rank in without))
        return (
            f"no GPU on {', '.join(nodes[:8])} ({in_words(without)}), but others have one; see what nvidia-smi says"
            " there, leave the machine out, or give --distributed-backend gloo to train on CPUs"
        )
    return None
