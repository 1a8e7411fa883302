"""Simulated hosts on one Linux machine: network namespaces joined by a switch.

    host 0: eth0 10.88.0.1 --- p0 [switch: a bridge in a namespace of its own] p1 --- eth0 10.88.0.2: host 1 ...

Needs root and iproute2.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Self

INTERFACE = "eth0"
"""Of each host."""
_NAMESPACES = Path("/run/netns")
_NEW_NETWORK = 0x40000000


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
