"""SparseLoCo (Sarfi et al., arXiv:2508.15706): DiLoCo with top-k sparsified, quantized outer gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from rivals.diloco import OuterStep

CHUNK = 4096
KEPT = 128
"""Of a chunk: 3 %, the upper end of the published range."""
DECAY = 0.95
"""Of what error feedback holds, at each outer step, as published; it stands for an outer momentum."""


class SparseOuterStep(OuterStep):
    """Outer step with the mean of sparse messages: of each chunk the ``KEPT`` largest entries, in 2 bits each.

    The rest stays in each replica's error feedback. An entry is sent as its index (12 bits), its sign, and one bit that
    selects one of two magnitudes, at a quarter and three quarters of the range between the smallest and the largest
    sent; these two bounds are sent in fp32, once per chunk. Chunks run through all weights in order; the last is
    padded.

    Args:
        weights: of this replica's model, fp32; the same on all replicas now.
        rate: of the outer step; 1 as published.
    """

    def __init__(self, weights: Iterable[torch.Tensor], *, rate: float = 1.0) -> None:
        super().__init__(weights, rate=rate, momentum=0.0)
        elements = sum(weight.numel() for weight in self._weights)
        self._error = torch.zeros(-(-elements // CHUNK), CHUNK)

    def _mean_way(self, way: torch.Tensor) -> tuple[torch.Tensor, float]:
        self._error.mul_(DECAY).add_(pad(way, (0, self._error.numel() - way.numel())).view_as(self._error))
        packet = pack(self._error)
        self._error -= unpack(packet)
        packets = [torch.empty_like(packet) for _ in range(dist.get_world_size())]
        dist.all_gather(packets, packet)
        mean = sum(map(unpack, packets), torch.zeros_like(self._error)).div_(len(packets))
        return mean.flatten()[: way.numel()], float((len(packets) - 1) * packet.nbytes)


def pack(values: torch.Tensor) -> torch.Tensor:
    """The message, uint8, of the largest entries of each row of ``values`` (rows, ``CHUNK``), fp32."""
    rows = len(values)
    places = values.abs().topk(KEPT, dim=1, sorted=False).indices  # (rows, KEPT)
    kept = values.gather(1, places)
    magnitudes = kept.abs()
    least, most = magnitudes.amin(1, keepdim=True), magnitudes.amax(1, keepdim=True)
    codes = 2 * (kept < 0).long() + (magnitudes > (least + most) / 2).long()
    pairs = places.view(rows, KEPT // 2, 2)  # two 12-bit indices in three bytes
    place_bytes = torch.stack(
        [pairs[..., 0] >> 4, (pairs[..., 0] & 15) << 4 | pairs[..., 1] >> 8, pairs[..., 1] & 255], dim=-1
    )
    code_bytes = (codes.view(rows, KEPT // 4, 4) << torch.tensor([0, 2, 4, 6])).sum(-1)
    range_bytes = torch.cat([least, most], dim=1).view(torch.uint8)  # (rows, 8)
    return torch.cat([range_bytes, place_bytes.flatten(1).to(torch.uint8), code_bytes.to(torch.uint8)], dim=1)


def unpack(packet: torch.Tensor) -> torch.Tensor:
    """The rows decoded from a message of ``pack``: (rows, ``CHUNK``), fp32, mostly zero."""
    rows = len(packet)
    ends = [8, KEPT * 12 // 8, KEPT // 4]  # an index has 12 bits, a code 2
    range_bytes, place_bytes, code_bytes = packet.split(ends, dim=1)
    least, most = range_bytes.contiguous().view(torch.float32).split(1, dim=1)
    first, middle, last = place_bytes.long().view(rows, KEPT // 2, 3).unbind(-1)
    places = torch.stack([first << 4 | middle >> 4, (middle & 15) << 8 | last], dim=-1).view(rows, KEPT)
    codes = (code_bytes.long().unsqueeze(-1) >> torch.tensor([0, 2, 4, 6]) & 3).view(rows, KEPT)
    magnitudes = least + (most - least) * torch.where(codes % 2 == 1, 0.75, 0.25)
    return torch.zeros(rows, CHUNK).scatter_(1, places, torch.where(codes >= 2, -magnitudes, magnitudes))
