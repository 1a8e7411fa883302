"""Hosts simulated on one Linux machine, whose links can be cut or slowed down. Needs root and iproute2."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from benchmarks.hosts import INTERFACE, SwitchedHosts, address_of

PREFIX = "faults"
_NETWORK = "10.88.0"
MOST = 4
NAMES = [f"host{host}" for host in range(MOST)]
# torch looks up every peer's name, an IPv4 peer's also by its IPv6-mapped address, and there is no DNS server
HOSTS_FILE = f"127.0.0.1 localhost {socket.gethostname()}\n" + "".join(
    f"{address} {name}\n::ffff:{address} {name}\n"
    for name, address in zip(NAMES, (address_of(host, _NETWORK) for host in range(MOST)), strict=True)
)


def know_names(folder: Path) -> None:
    """Mount a file with the hosts' names over /etc/hosts; the caller should be in a private mount namespace."""
    file = folder / "hosts"
    file.write_text(HOSTS_FILE)
    subprocess.run(["mount", "--bind", str(file), "/etc/hosts"], check=True)


class Hosts(SwitchedHosts):
    """The hosts; a context manager.

    Args:
        number: distinguishes sets of hosts of one process.
        count: how many, up to ``MOST``.
    """

    def __init__(self, number: int, count: int = 2) -> None:
        super().__init__(PREFIX, _NETWORK, count, number)

    def cut(self, host: int) -> list[str]:
        """The command that cuts a host's link: packets in both directions are lost silently."""
        return ["ip", "-n", self.switch, "link", "set", self.port(host), "down"]

    def plug_in(self, host: int) -> list[str]:
        """The command that undoes ``cut``."""
        return ["ip", "-n", self.switch, "link", "set", self.port(host), "up"]

    def slow_down(self, host: int, kilobits: int) -> list[str]:
        """The command that limits the rate at which a host sends, in kbit/s."""
        bucket = ["tbf", "rate", f"{kilobits}kbit", "burst", "4000", "limit", "10000000"]
        return ["tc", "-n", self.namespaces[host], "qdisc", "replace", "dev", INTERFACE, "root", *bucket]

    def mend(self) -> None:
        """Undo all of these."""
        for host in range(len(self.namespaces)):
            subprocess.run(self.plug_in(host), check=True)
            remove = ["tc", "-n", self.namespaces[host], "qdisc", "del", "dev", INTERFACE, "root"]
            subprocess.run(remove, check=False, stderr=subprocess.DEVNULL)
