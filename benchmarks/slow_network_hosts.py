"""Hosts on one Linux machine: network namespaces on a switch, whose links are as slow as one likes.

    host 0: eth0 10.89.0.1 --- p0 [switch: a bridge in a namespace of its own] p1 --- eth0 10.89.0.2: host 1 ...

A token bucket at each end of a link caps what a host sends and what it receives. Both buckets are small, so that short
messages are held to the rate too; what TCP hands over in larger pieces they cut into frames of 1500 bytes (from 100
Mbit/s on, into pieces of 16 KiB, which count with one header each). No delay is added. Needs root and iproute2.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"
UNLIMITED = "unlimited"
HEADER_BYTES = 66
"""Ethernet, IPv4 and TCP with time stamps, of each frame."""
CONGESTION_CONTROL = "cubic"
"""What Linux has by default."""
_PREFIX = "slownet"
_NEW_NETWORK = 0x40000000
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SMALLEST_BUCKET = 3100  # bytes: two frames
_BUCKET_SECONDS = 0.00025
_FAST = 100e6
_SUPER_FRAME = 16384  # bytes
_QUEUE_BYTES = 16 << 20  # collectives lose nothing
_SETTINGS = {
    "ipv6/conf/all/disable_ipv6": "1",  # an idle link carries nothing
    "ipv4/tcp_sack": "0",  # all headers are of one length
    "ipv4/tcp_early_retrans": "0",  # a busy machine is late; that is no loss
    "ipv4/tcp_no_metrics_save": "1",  # no run depends on the one before
    "ipv4/tcp_slow_start_after_idle": "0",
}


def bits_per_second(rate: str) -> float | None:
    """Of a rate such as 50mbit or 1.5gbit; None for ``unlimited``.

    Raises:
        ValueError: it is neither.
    """
    if rate == UNLIMITED:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or not float(match[1]) > 0:
        raise ValueError(f"{rate!r} is no rate; expected one such as 50mbit or 1gbit, or {UNLIMITED}")
    return float(match[1]) * _UNITS[match[2]]


def why_not() -> str | None:
    """What this machine or user lacks to make hosts, if anything."""
    if os.geteuid() != 0:
        return "this user is not root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"{' and '.join(missing)} of iproute2 not found" if missing else None


@dataclass(frozen=True)
class Enter:
    """Moves the process that calls it to the host of its rank, and tells gloo to use that host's interface."""

    hosts: str

    def __call__(self, rank: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        name = f"{self.hosts}-{rank}"
        with open(f"/run/netns/{name}") as namespace:
            if libc.setns(namespace.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter {name}")
        for setting, value in _SETTINGS.items():
            Path("/proc/sys/net", setting).write_text(value)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


class Hosts:
    """``number`` hosts without caps at first; a context manager."""

    def __init__(self, number: int) -> None:
        self._name = f"{_PREFIX}{os.getpid()}"
        self._hosts = [f"{self._name}-{host}" for host in range(number)]
        self._switch = f"{self._name}-switch"

    @property
    def enter(self) -> Enter:
        """What a process calls with its rank to be on that host."""
        return Enter(self._name)

    def cap(self, rate: str) -> None:
        """Let no host send, and none receive, faster than ``rate``."""
        bits = bits_per_second(rate)
        for host, name in enumerate(self._hosts):
            for namespace, interface in ((name, INTERFACE), (self._switch, f"p{host}")):
                at = ["tc", "-n", namespace, "qdisc"]
                if bits is None:
                    subprocess.run([*at, "del", "dev", interface, "root"], check=False, stderr=subprocess.DEVNULL)
                    continue
                bucket = ["tbf", "rate", f"{round(bits)}bit", "burst", str(_burst(bits)), "limit", str(_QUEUE_BYTES)]
                subprocess.run([*at, "replace", "dev", interface, "root", *bucket], check=True)

    def __enter__(self) -> Hosts:
        _remove_left_overs()
        try:
            self._create()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*self._hosts, self._switch):
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)

    def _create(self) -> None:
        for name in (self._switch, *self._hosts):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        bridge = ("type", "bridge", "stp_state", "0", "mcast_snooping", "0")
        _ip("-n", self._switch, "link", "add", "br0", *bridge)
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for host, name in enumerate(self._hosts):
            address, port = f"10.89.0.{host + 1}", f"p{host}"
            peer = ("peer", "name", port, "netns", self._switch)
            _ip("link", "add", INTERFACE, "netns", name, "type", "veth", *peer)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", self._switch, "link", "set", port, "master", "br0")
            _ip("-n", name, "link", "set", INTERFACE, "up", "gso_max_size", str(_SUPER_FRAME))
            _ip("-n", self._switch, "link", "set", port, "up")
            # nothing is ever lost, so what is late is not to be sent again soon; and what this machine prefers for
            # congestion control does not count (bbr, which guesses a rate for each peer, fills such links less well)
            network = ("10.89.0.0/24", "dev", INTERFACE, "src", address, "proto", "kernel", "scope", "link")
            _ip("-n", name, "route", "replace", *network, "rto_min", "1s", "congctl", CONGESTION_CONTROL)


@dataclass(frozen=True)
class Sent:
    """What an interface has sent: bytes of frames with their headers, frames, and segments that TCP sent again."""

    bytes: int = 0
    frames: int = 0
    resent: int = 0

    @staticmethod
    def so_far() -> Sent:
        """By the interface of the host that this process is on; nothing where it is on none."""
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == INTERFACE:
                columns = [int(number) for number in numbers.split()]
                return Sent(columns[8], columns[9], _resent())
        return Sent()

    @property
    def payload(self) -> int:
        """Bytes without headers. Counted right for frames that a token bucket let through, and for longer ones."""
        return self.bytes - HEADER_BYTES * self.frames

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.bytes + other.bytes, self.frames + other.frames, self.resent + other.resent)

    def __sub__(self, other: Sent) -> Sent:
        return Sent(self.bytes - other.bytes, self.frames - other.frames, self.resent - other.resent)


def _burst(bits: float) -> int:
    """Bytes that may pass at once: few, but at a high rate as many as TCP hands over at once, to spare the cores."""
    return max(_SMALLEST_BUCKET if bits < _FAST else 2 * _SUPER_FRAME, round(bits / 8 * _BUCKET_SECONDS))


def _resent() -> int:
    names, values = [
        line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    ]
    return int(values[names.index("RetransSegs")])


def _remove_left_overs() -> None:
    """Remove hosts of processes that were killed."""
    for namespace in Path("/run/netns").glob(f"{_PREFIX}*-*"):
        process = namespace.name.removeprefix(_PREFIX).split("-")[0]
        if process.isdecimal() and not Path("/proc", process).exists():
            subprocess.run(["ip", "netns", "del", namespace.name], check=False, stderr=subprocess.DEVNULL)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
