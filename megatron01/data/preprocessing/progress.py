"""How far preprocessing is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from tqdm import tqdm

from megatron01.data.preprocessing.summary import PreprocessSummary
from megatron01.units import format_duration


class Progress:
    """Shows documents, tokens, MB/s, and the time left where the size of the input is known.

    Args:
        total: bytes of the input on the disk; None if unknown.
        done: those of them that an interrupted run has read.
        summary: what an interrupted run has done.
        log_interval: documents between two lines.
        stream: what to write to.
    """

    def __init__(
        self, total: int | None, done: int, summary: PreprocessSummary, log_interval: int, stream: TextIO | None = None
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total = total
        self._done_before = done
        self._bytes_before = summary.num_bytes
        self._log_interval = log_interval
        self._next_log = summary.documents + log_interval
        self._start = time.monotonic()
        self._bar: tqdm | None = None
        if self._stream.isatty():
            known = "{percentage:3.0f}% |{bar}| {elapsed}, {remaining} left{postfix}"
            form = "{elapsed}{postfix}" if total is None else known
            self._bar = tqdm(total=total, initial=done, bar_format=form, file=self._stream, dynamic_ncols=True)

    def update(self, summary: PreprocessSummary, done: int) -> None:
        """Show what was done so far; ``done`` of the input's bytes on the disk."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = (summary.num_bytes - self._bytes_before) / 1e6 / seconds
        tokens = sum(summary.tokens.values())
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"{summary.documents} documents, {tokens / 1e6:.1f}M tokens, {rate:.1f} MB/s", refresh=False
            )
            self._bar.update(done - self._bar.n)
        elif summary.documents >= self._next_log:
            self._next_log = (summary.documents // self._log_interval + 1) * self._log_interval
            left = ""
            if self._total and done > self._done_before:
                remaining = (self._total - done) * seconds / (done - self._done_before)
                left = f", {done / self._total:.0%} done, {format_duration(remaining)} left"
            line = f"{summary.documents} documents, {tokens} tokens, {rate:.1f} MB/s{left}"
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the terminal to others."""
        if self._bar is not None:
            self._bar.close()
