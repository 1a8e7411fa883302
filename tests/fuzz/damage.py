"""Ways to damage files, accidental or malicious; every choice is drawn from given random numbers."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, victim: Path) -> None:
        self._victim = str(victim)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (self._victim,)


def damaged_bytes(content: bytes, numbers: random.Random) -> tuple[str, bytes]:
    """What was done, and the content with one to three places damaged."""
    changed = bytearray(content)
    kind = numbers.choice(["bits flipped", "bytes cut", "bytes inserted", "bytes replaced", "end cut", "end repeated"])
    for _ in range(numbers.randint(1, 3)):
        first = numbers.randrange(len(changed) + 1)
        length = numbers.choice([1, 2, 8, 100])
        noise = numbers.choice([numbers.randbytes(length), b"\xff" * length, b"\0" * length])
        if kind == "bits flipped" and first < len(changed):
            changed[first] ^= 1 << numbers.randrange(8)
        elif kind == "bytes cut":
            del changed[first : first + length]
        elif kind == "bytes inserted":
            changed[first:first] = noise
        elif kind == "bytes replaced":
            changed[first : first + length] = noise
        elif kind == "end cut":
            del changed[first:]
        elif kind == "end repeated":
            changed += changed[first:]
    return kind, bytes(changed)


def damage_file(path: Path, others: list[Path], numbers: random.Random, victim: Path) -> str:
    """Damage a file, or put something else in its place. Returns what was done.

    Args:
        path: of the file.
        others: files that it may be swapped with.
        victim: a folder that a malicious pickle would create.
    """
    kind = numbers.choice(["bytes"] * 4 + ["missing", "folder", "pipe", "link", "link to itself", "swapped", "payload"])
    if kind == "bytes":
        kind, content = damaged_bytes(path.read_bytes(), numbers)
        path.write_bytes(content)
        return kind
    if kind == "swapped":
        other = numbers.choice(others)
        here, there = path.read_bytes(), other.read_bytes()
        path.write_bytes(there)
        other.write_bytes(here)
        return kind
    if kind == "payload":
        path.write_bytes(pickle.dumps(Payload(victim)))
        return kind
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(numbers.choice(["/dev/zero", "/etc/passwd", "/nowhere", "..", str(others[0])]))
    elif kind == "link to itself":
        path.symlink_to(path.name)
    return kind


HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2,
    10**9,
    10**15,
    2**63,
    10**400,
    1e308,
    -0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../../etc/passwd",
    "/etc/passwd",
    "..",
    "a\nb",
    "\x1b[2J",
    "\ud800",
    "y" * 100_000,
    [],
    {},
    [[]],
    [None] * 1000,
    {"a": {"b": []}},
    [[0, 10**15]],
    [10**6, 10**6, 10**6],
]


def edited(tree: Any, numbers: random.Random) -> Any:
    """A structure of dicts and lists with one to three entries replaced, removed or added."""
    for _ in range(numbers.randint(1, 3)):
        if not isinstance(tree, (dict, list)) or not tree:
            return tree
        holder, key = _somewhere(tree, numbers)
        what = numbers.choice(["replaced"] * 4 + ["removed", "added", "copied"])
        if what == "replaced":
            holder[key] = numbers.choice(HOSTILE)
        elif what == "removed":
            del holder[key]
        elif isinstance(holder, list):
            holder.insert(key, numbers.choice(HOSTILE) if what == "added" else holder[key])
        else:
            name = numbers.choice(["", "extra", "../x", "n" * 10_000, "replica_00001/u"])
            holder[name] = numbers.choice(HOSTILE) if what == "added" else holder[key]
    return tree


def _somewhere(tree: Any, numbers: random.Random) -> tuple[Any, Any]:
    """A place in the tree: drawn uniformly, or by a random walk, so that short branches are chosen too."""
    if numbers.random() < 0.5:
        return numbers.choice(list(_places(tree)))
    holder = tree
    while True:
        key = numbers.choice(list(holder)) if isinstance(holder, dict) else numbers.randrange(len(holder))
        inner = holder[key]
        if not isinstance(inner, (dict, list)) or not inner or numbers.random() < 0.1:
            return holder, key
        holder = inner


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], (dict, list)):
            yield from _places(holder[key])


def remove(path: Path) -> None:
    """Delete a folder with whatever is in it."""
    shutil.rmtree(path, ignore_errors=True)
