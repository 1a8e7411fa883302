"""Whether the replicas that start an optimizer mean the same model and the same settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megatron01.comm import Topology
from megatron01.comm.payload import HEADER_BYTES
from megatron01.errors import UserError
from megatron01.optim.flat import FlatLayout


def check_agreement(
    layout: FlatLayout,
    masks: Mapping[int, torch.Tensor],
    param_groups: Sequence[Mapping[str, Any]],
    settings: tuple[Any, ...],
    topology: Topology,
) -> None:
    """Compare a hash of parameters, masks by parameter number, groups and other settings over the replicas.

    Raises:
        UserError: on every replica, if they differ.
    """
    if topology.world.size == 1:
        return
    description = [
        (p.name, tuple(p.tensor.shape), p.tensor.stride(), str(p.tensor.dtype), p.group) for p in layout.parameters
    ]
    masked = [
        (index, tuple(mask.shape), hashlib.sha256(mask.cpu().contiguous().numpy().data).hexdigest())
        for index, mask in sorted(masks.items())
    ]
    groups = [(float(group["weight_decay"]), float(group["lr_scale"])) for group in param_groups]
    own = np.frombuffer(hashlib.sha256(repr((description, masked, groups, settings)).encode()).digest(), np.uint8)
    row = torch.from_numpy(np.pad(own, (HEADER_BYTES, 0))).to(layout.device)
    digests = torch.zeros(topology.world.size, row.numel(), dtype=torch.uint8, device=layout.device)
    topology.world.all_gather(digests, row).wait()
    topology.reset_counters()
    different = (digests != digests[0]).any(1).nonzero().flatten().tolist()
    if different:
        raise UserError(
            f"replicas {different} have other parameters (names, shapes, memory layout, order, groups), another "
            "schedule or other optimizer settings than 0; expected the same on all"
        )
