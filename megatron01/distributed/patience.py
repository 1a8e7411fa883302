"""Process groups for waits as long as an index takes to build or a file to write."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron01.distributed.opening import open_gloo_group

# Such work may take hours; gloo reports a peer's death at once, whatever the time-out.
PATIENCE = datetime.timedelta(days=7)


def open_patient_group(timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks, which they open together, and whose collectives then wait for days.

    Args:
        timeout: for opening it. torch gives a group one time-out for both, and a replica that is lost before it
            has joined would be waited for as long.
    """
    group = open_gloo_group(timeout)
    _set_pg_timeout(PATIENCE, group)
    return group


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """The time-out of a gloo group's collectives."""
    timeout: datetime.timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout
