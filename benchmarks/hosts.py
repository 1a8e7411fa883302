"""Simulated hosts on one Linux machine: network namespaces joined by a switch, with bandwidth caps on their links.

    host 0: eth0 10.88.0.1 --- p0 [switch: a bridge in a namespace of its own] p1 --- eth0 10.88.0.2: host 1 ...

Needs root and iproute2.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

INTERFACE = "eth0"
"""Of each host."""
_NAMESPACES = Path("/run/netns")
_NEW_NETWORK = 0x40000000
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


def why_not() -> str | None:
    """The reason why this machine or user cannot create hosts; None if it can."""
    if os.geteuid() != 0:
        return "this user is not root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"{' and '.join(missing)} of iproute2 not found" if missing else None


def address_of(host: int, network: str) -> str:
    """IPv4 address of a host in a network, given by its first three numbers."""
    return f"{network}.{host + 1}"


def enter(namespace: str) -> None:
    """Move the calling process to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(_NAMESPACES / namespace) as file:
        if libc.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def remove_left_overs(prefix: str) -> None:
    """Remove the hosts of killed processes."""
    for namespace in _NAMESPACES.glob(f"{prefix}*-*"):
        process = namespace.name.removeprefix(prefix).split("-")[0]
        if process.isdecimal() and not Path("/proc", process).exists():
            _remove(namespace.name)
            namespace.unlink(missing_ok=True)  # left behind by a mount in another mount namespace


class SwitchedHosts:
    """``count`` hosts; a context manager.

    Their namespaces' names begin with ``prefix`` and the id of this process, their addresses with the three numbers of
    ``network``; ``number`` distinguishes several sets of hosts of one process.
    """

    def __init__(self, prefix: str, network: str, count: int, number: int = 0) -> None:
        name = f"{prefix}{os.getpid()}-{number}"
        self.namespaces = [f"{name}-{host}" for host in range(count)]  # of the hosts
        self.switch = f"{name}-switch"  # namespace of the bridge
        self._network = network

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return address_of(host, self._network)

    def port(self, host: int) -> str:
        """The switch's interface to a host."""
        return f"p{host}"

    def __enter__(self) -> Self:
        try:
            self._create()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.namespaces, self.switch):
            _remove(name)

    def _create(self) -> None:
        for name in (self.switch, *self.namespaces):
            run_ip("netns", "add", name)
            run_ip("-n", name, "link", "set", "lo", "up")
        bridge = ("type", "bridge", "stp_state", "0", "mcast_snooping", "0")  # it sends no traffic of its own
        run_ip("-n", self.switch, "link", "add", "br0", *bridge)
        run_ip("-n", self.switch, "link", "set", "br0", "up")
        for host, name in enumerate(self.namespaces):
            port = self.port(host)
            peer = ("peer", "name", port, "netns", self.switch)
            run_ip("link", "add", INTERFACE, "netns", name, "type", "veth", *peer)
            run_ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            run_ip("-n", self.switch, "link", "set", port, "master", "br0")
            run_ip("-n", name, "link", "set", INTERFACE, "up")
            run_ip("-n", self.switch, "link", "set", port, "up")


def run_ip(*arguments: str) -> None:
    """Run ``ip`` of iproute2."""
    subprocess.run(["ip", *arguments], check=True)


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], check=False, stderr=subprocess.DEVNULL)


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


class SlowHosts(SwitchedHosts):
    """``number`` hosts whose links can be capped; initially they are not.

    A token bucket at each end of a link caps what a host sends and what it receives. Both buckets are small, so that
    short messages are limited to the rate too; larger TCP segments are cut into frames of 1500 bytes (from 100 Mbit/s
    on, into pieces of 16 KiB, which count with one header each). No delay is added.
    """

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
