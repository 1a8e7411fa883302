"""Some hosts on one Linux machine: network namespaces on a switch, whose cables can be unplugged or made slow.

    host 0: eth0 10.88.0.1 --- p0 [switch: a bridge in a third namespace] p1 --- eth0 10.88.0.2: host 1

Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from types import TracebackType

MOST = 4
NAMES = [f"host{host}" for host in range(MOST)]


def _address(host: int) -> str:
    return f"10.88.0.{host + 1}"


# torch asks for the name of every peer, of an IPv4 peer also by its address in IPv6, and there is no server to ask
HOSTS_FILE = f"127.0.0.1 localhost {socket.gethostname()}\n" + "".join(
    f"{_address(host)} {name}\n::ffff:{_address(host)} {name}\n" for host, name in enumerate(NAMES)
)


def can_be_made() -> bool:
    """Whether this machine and user can make namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


def know_names(folder: Path) -> None:
    """Put the names of hosts where programs look for them. Mounts a file, so the caller's mounts should be its own."""
    file = folder / "hosts"
    file.write_text(HOSTS_FILE)
    subprocess.run(["mount", "--bind", str(file), "/etc/hosts"], check=True)


def remove_left_overs() -> None:
    """Remove hosts of processes that were killed; ``Hosts`` of this module are named after the process."""
    for namespace in Path("/run/netns").glob("faults*-*"):
        number = namespace.name.removeprefix("faults").split("-")[0]
        if number.isdecimal() and not Path(f"/proc/{number}").exists():
            subprocess.run(["ip", "netns", "del", namespace.name], check=False, stderr=subprocess.DEVNULL)
            namespace.unlink(missing_ok=True)  # a mount of another mount namespace leaves its place


class Hosts:
    """The hosts; a context manager.

    Args:
        number: tells hosts of one process apart.
        count: how many, up to ``MOST``.
    """

    def __init__(self, number: int, count: int = 2) -> None:
        name = f"faults{os.getpid()}-{number}"
        self.namespaces = [f"{name}-{host}" for host in range(count)]
        self._switch = f"{name}-switch"

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return _address(host)

    def cut(self, host: int) -> list[str]:
        """The command that unplugs a host: what it sends and what is sent to it is lost, and nobody is told."""
        return ["ip", "-n", self._switch, "link", "set", f"p{host}", "down"]

    def plug_in(self, host: int) -> list[str]:
        """The command that ends ``cut``."""
        return ["ip", "-n", self._switch, "link", "set", f"p{host}", "up"]

    def slow_down(self, host: int, kilobits: int) -> list[str]:
        """The command that limits what a host sends, to kbit/s."""
        bucket = ["tbf", "rate", f"{kilobits}kbit", "burst", "4000", "limit", "10000000"]
        return ["tc", "-n", self.namespaces[host], "qdisc", "replace", "dev", "eth0", "root", *bucket]

    def mend(self) -> None:
        """As at the beginning."""
        for host in range(len(self.namespaces)):
            subprocess.run(self.plug_in(host), check=True)
            remove = ["tc", "-n", self.namespaces[host], "qdisc", "del", "dev", "eth0", "root"]
            subprocess.run(remove, check=False, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Hosts:
        for name in (self._switch, *self.namespaces):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge", "stp_state", "0")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for host, name in enumerate(self.namespaces):
            port = f"p{host}"
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch)
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", self._switch, "link", "set", port, "master", "br0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", self._switch, "link", "set", port, "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*self.namespaces, self._switch):
            _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
