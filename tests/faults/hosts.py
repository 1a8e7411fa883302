"""Some hosts on one Linux machine whose cables can be unplugged or made slow. Needs root and iproute2."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from benchmarks.switched_hosts import INTERFACE, SwitchedHosts, address_of

PREFIX = "faults"
_NETWORK = "10.88.0"
MOST = 4
NAMES = [f"host{host}" for host in range(MOST)]
# torch asks for the name of every peer, of an IPv4 peer also by its address in IPv6, and there is no server to ask
HOSTS_FILE = f"127.0.0.1 localhost {socket.gethostname()}\n" + "".join(
    f"{address} {name}\n::ffff:{address} {name}\n"
    for name, address in zip(NAMES, (address_of(host, _NETWORK) for host in range(MOST)), strict=True)
)


def know_names(folder: Path) -> None:
    """Put the names of hosts where programs look for them. Mounts a file, so the caller's mounts should be its own."""
    file = folder / "hosts"
    file.write_text(HOSTS_FILE)
    subprocess.run(["mount", "--bind", str(file), "/etc/hosts"], check=True)


class Hosts(SwitchedHosts):
    """The hosts; a context manager.

    Args:
        number: tells hosts of one process apart.
        count: how many, up to ``MOST``.
    """

    def __init__(self, number: int, count: int = 2) -> None:
        super().__init__(PREFIX, _NETWORK, count, number)

    def cut(self, host: int) -> list[str]:
        """The command that unplugs a host: what it sends and what is sent to it is lost, and nobody is told."""
        return ["ip", "-n", self.switch, "link", "set", self.port(host), "down"]

    def plug_in(self, host: int) -> list[str]:
        """The command that ends ``cut``."""
        return ["ip", "-n", self.switch, "link", "set", self.port(host), "up"]

    def slow_down(self, host: int, kilobits: int) -> list[str]:
        """The command that limits what a host sends, to kbit/s."""
        bucket = ["tbf", "rate", f"{kilobits}kbit", "burst", "4000", "limit", "10000000"]
        return ["tc", "-n", self.namespaces[host], "qdisc", "replace", "dev", INTERFACE, "root", *bucket]

    def mend(self) -> None:
        """As at the beginning."""
        for host in range(len(self.namespaces)):
            subprocess.run(self.plug_in(host), check=True)
            remove = ["tc", "-n", self.namespaces[host], "qdisc", "del", "dev", INTERFACE, "root"]
            subprocess.run(remove, check=False, stderr=subprocess.DEVNULL)
