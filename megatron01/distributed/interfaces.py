"""The network interfaces of this machine, and the one that gloo takes."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_LOOPBACK = "127."


@dataclass(frozen=True)
class Interface:
    """A network interface that has an IPv4 address.

    Attributes:
        megabits: per second, as its driver says; None where it does not (virtual ones, Wi-Fi).
    """

    name: str
    address: str
    megabits: int | None

    @property
    def is_loopback(self) -> bool:
        return self.address.startswith(_LOOPBACK)


def interfaces() -> list[Interface]:
    """Those of this machine, in the kernel's order."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            found.append(Interface(name, socket.inet_ntoa(answer[20:24]), _megabits(name)))
    return found


def gloo_interface(environ: Mapping[str, str] = os.environ) -> Interface | None:
    """The one that torch's gloo listens on; None if it is not among ``interfaces``.

    As torch does: the first of GLOO_SOCKET_IFNAME, or the one that holds the address to which this machine's name
    leads, or the loopback, which no other machine reaches.
    """
    available = interfaces()
    if chosen := environ.get("GLOO_SOCKET_IFNAME"):
        return next((each for each in available if each.name == chosen.split(",")[0]), None)
    addresses = addresses_of(socket.gethostname())
    for address in addresses:
        if found := next((each for each in available if each.address == address), None):
            return found
    if any(address.startswith(_LOOPBACK) for address in addresses) or not addresses:
        return next((each for each in available if each.is_loopback), None)
    return None


def addresses_of(host: str) -> list[str]:
    """The IPv4 addresses to which a name leads on this machine; none if it is not known."""
    try:
        return list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, socket.AF_INET)))
    except OSError:
        return []


def _megabits(name: str) -> int | None:
    try:
        speed = int(Path("/sys/class/net", name, "speed").read_text())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None
