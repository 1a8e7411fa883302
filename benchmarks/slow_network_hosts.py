"""Simulated hosts on one Linux machine with bandwidth caps on their links.

A token bucket at each end of a link caps what a host sends and what it receives. Both buckets are small, so that short
messages are limited to the rate too; larger TCP segments are cut into frames of 1500 bytes (from 100 Mbit/s on, into
pieces of 16 KiB, which count with one header each). No delay is added. Needs root and iproute2.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from switched_hosts import INTERFACE, SwitchedHosts, enter, remove_left_overs, run_ip

UNLIMITED = "unlimited"
HEADER_BYTES = 66
"""Ethernet, IPv4 and TCP with time stamps, of each frame."""
CONGESTION_CONTROL = "cubic"
"""What Linux has by default."""
_PREFIX = "slownet"
_NETWORK = "10.89.0"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SMALLEST_BUCKET = 3100  # bytes: two frames
_BUCKET_SECONDS = 0.00025
_FAST = 100e6
_SUPER_FRAME = 16384  # bytes
_QUEUE_BYTES = 16 << 20  # large enough that collectives lose no packets
_SETTINGS = {
    "ipv6/conf/all/disable_ipv6": "1",  # no traffic on an idle link
    "ipv4/tcp_sack": "0",  # all headers have the same length
    "ipv4/tcp_early_retrans": "0",  # late packets on a busy machine are not losses
    "ipv4/tcp_no_metrics_save": "1",  # no metrics are carried over between runs
    "ipv4/tcp_slow_start_after_idle": "0",
}


def bits_per_second(rate: str) -> float | None:
    """Bits per second of a rate such as 50mbit or 1.5gbit; None for ``unlimited``. Raises ValueError for others."""
    if rate == UNLIMITED:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or not float(match[1]) > 0:
        raise ValueError(f"{rate!r} is no rate; expected one such as 50mbit or 1gbit, or {UNLIMITED}")
    return float(match[1]) * _UNITS[match[2]]


def enter_host(namespaces: list[str], rank: int) -> None:
    """Move the calling process to the host of its rank, and make gloo use that host's interface."""
    enter(namespaces[rank])
    for setting, value in _SETTINGS.items():
        Path("/proc/sys/net", setting).write_text(value)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


class Hosts(SwitchedHosts):
    """``number`` hosts, initially without caps; a context manager."""

    def __init__(self, number: int) -> None:
        super().__init__(_PREFIX, _NETWORK, number)

    def cap(self, rate: str) -> None:
        """Cap the bandwidth that each host sends and receives at ``rate``."""
        bits = bits_per_second(rate)
        for host, name in enumerate(self.namespaces):
            for namespace, interface in ((name, INTERFACE), (self.switch, self.port(host))):
                at = ["tc", "-n", namespace, "qdisc"]
                if bits is None:
                    subprocess.run([*at, "del", "dev", interface, "root"], check=False, stderr=subprocess.DEVNULL)
                    continue
                bucket = ["tbf", "rate", f"{round(bits)}bit", "burst", str(_burst(bits)), "limit", str(_QUEUE_BYTES)]
                subprocess.run([*at, "replace", "dev", interface, "root", *bucket], check=True)

    def __enter__(self) -> Self:
        remove_left_overs(_PREFIX)
        return super().__enter__()

    def _create(self) -> None:
        super()._create()
        for host, name in enumerate(self.namespaces):
            run_ip("-n", name, "link", "set", INTERFACE, "gso_max_size", str(_SUPER_FRAME))
            # no packets are lost, so a long minimum time-out avoids needless retransmissions; congestion control is
            # set, whatever this machine's default (bbr, which estimates a rate for each peer, fills such links less
            # well)
            network = f"{_NETWORK}.0/24 dev {INTERFACE} src {self.address(host)} proto kernel scope link".split()
            run_ip("-n", name, "route", "replace", *network, "rto_min", "1s", "congctl", CONGESTION_CONTROL)


@dataclass(frozen=True)
class Sent:
    """Traffic that an interface has sent: bytes of frames with headers, frames, and retransmitted TCP segments."""

    bytes: int = 0
    frames: int = 0
    resent: int = 0

    @staticmethod
    def so_far() -> Sent:
        """Traffic so far of this process's host; zero if it is on none."""
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == INTERFACE:
                columns = [int(number) for number in numbers.split()]
                return Sent(columns[8], columns[9], _resent())
        return Sent()

    @property
    def payload(self) -> int:
        """Bytes without headers. Correct for frames that a token bucket let through, and for longer ones."""
        return self.bytes - HEADER_BYTES * self.frames

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.bytes + other.bytes, self.frames + other.frames, self.resent + other.resent)

    def __sub__(self, other: Sent) -> Sent:
        return Sent(self.bytes - other.bytes, self.frames - other.frames, self.resent - other.resent)


def _burst(bits: float) -> int:
    """Burst size of the token bucket: small, but at high rates as large as TCP's segments, to save CPU time."""
    return max(_SMALLEST_BUCKET if bits < _FAST else 2 * _SUPER_FRAME, round(bits / 8 * _BUCKET_SECONDS))


def _resent() -> int:
    names, values = [
        line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    ]
    return int(values[names.index("RetransSegs")])
