"""Keys and values of the tokens that a causal model has seen, so that each new token costs one position only.

Sequences of different lengths stand in one batch with padding before them (left), so that all end at the same place and
grow together. Padding is masked and has no positions: each sequence computes what it would alone.

Legend: b sequences, n positions seen before, s new ones, a heads, d head size.
"""

from __future__ import annotations

import torch


class LayerCache:
    """Keys and values of one layer, in memory for ``max_length`` positions that is taken once."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = 0

    def append(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add those of new positions, each (b, a, s, d); all so far, each (b, a, n + s, d)."""
        if self._buffers is None:
            shape = (*key.shape[:2], self._max_length, key.shape[3])
            self._buffers = key.new_empty(shape), value.new_empty(shape)
        start, self._length = self._length, self._length + key.shape[2]
        assert self._length <= self._max_length, f"{self._length} positions in a cache of {self._max_length}"
        keys, values = self._buffers
        keys[:, :, start : self._length] = key
        values[:, :, start : self._length] = value
        return keys[:, :, : self._length], values[:, :, : self._length]


class KeyValueCache:
    """The caches of all layers, and where the batch is.

    Args:
        num_layers: of the model.
        max_length: positions, with padding, that the batch can grow to.
        padding: (b,) int64, the positions before each sequence that are padding.
    """

    def __init__(self, num_layers: int, max_length: int, padding: torch.Tensor) -> None:
        self.layers = [LayerCache(max_length) for _ in range(num_layers)]
        self.length = 0
        self._padding = padding

    def position_ids(self, num_new: int, num_positions: int) -> torch.Tensor:
        """(b, s) int64: the places of the next ``num_new`` tokens in their sequences, within a table of positions."""
        places = torch.arange(self.length, self.length + num_new, device=self._padding.device)
        return (places - self._padding[:, None]).clamp(0, num_positions - 1)

    def mask(self, num_new: int, dtype: torch.dtype) -> torch.Tensor:
        """(b, 1, s, n + s), added to attention scores: 0 where one of the next tokens may see an earlier one or itself.

        The most negative finite number elsewhere, so that a row of padding alone gives no NaN.
        """
        keys = torch.arange(self.length + num_new, device=self._padding.device)
        queries = keys[self.length :]
        hidden = keys > queries[:, None]  # (s, n + s)
        hidden = hidden | (keys < self._padding[:, None])[:, None]  # (b, s, n + s)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]
