"""Exclusive ownership of a folder by one job, by a lock file with a heartbeat; for local and shared file systems.

    {folder}/owner.json    host, process, job and start time of the owner; touched every few seconds; removed at its end

On file systems with locks the file is locked, and the lock ends with its process. Where locks are missing, or hold on
one machine only, the file's modification time is the owner's heartbeat, by the file server's clock alone. The locks
are POSIX locks (lockf): they work on NFS, and forked processes do not inherit them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from megatron01.errors import UserError
from megatron01.utils.files import json_object_or_empty, open_to_change, temporary_path, writing
from megatron01.utils.formatting import one_line
from megatron01.utils.system import boot_id

OWNER_NAME = "owner.json"
BEAT_SECONDS = 5.0  # heartbeat interval: time between two touches of the file
SILENT_SECONDS = 30.0  # an owner without a heartbeat for so long is considered dead, unless it holds a lock
WAIT_SECONDS = SILENT_SECONDS + 2 * BEAT_SECONDS
"""How long to wait for a live owner to end: the ranks of a killed launcher end by themselves."""
LOCKED_SECONDS = 120.0
"""How long to wait for an owner with a lock but no heartbeat: file servers keep a dead machine's locks for a while."""
_LARGEST = 4096  # bytes
_BUSY = (errno.EAGAIN, errno.EACCES)


class FolderOwner:
    """This process's ownership of a folder, created if missing, from construction until ``release``.

    Raises UserError if another process owns the folder, or it cannot be written.

    Args:
        say: prints a line, called once if another owner has to end first.
        wait_seconds: seconds to wait for a live owner to end.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], *, wait_seconds: float = WAIT_SECONDS) -> None:
        self.folder, self.path = folder, folder / OWNER_NAME
        self.lost: str | None = None  # why this process no longer owns the folder, as checked at each heartbeat
        self._own = _own_entry()
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._claim(say, wait_seconds)
        threading.Thread(target=self._beat, name=f"owner of {folder}", daemon=True).start()

    def require(self) -> None:
        """Raises UserError if another process has taken the folder over; a deleted folder is claimed again."""
        with self._lock, writing(self.path):
            lost = self._reason_lost()
            if lost is None:
                return
            if self.path.exists():
                raise UserError(f"{lost}; nothing is written there any more")
            with suppress(OSError):
                self._file.close()
            self._claim(lambda line: None, 0.0)

    def release(self) -> None:
        """Give up ownership: remove the file and the lock."""
        with self._lock:
            if self._released.is_set():
                return
            self._released.set()
            with suppress(OSError):
                if self._reason_lost() is None:
                    self.path.unlink()
            with suppress(OSError):  # a file server that is gone makes close fail, too
                self._file.close()

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with self._lock, suppress(OSError):
                if self._released.is_set():
                    return
                self.lost = self.lost or self._reason_lost()
                if self.lost is None:
                    os.utime(self._file.fileno())

    def _reason_lost(self) -> str | None:
        """Why this process no longer owns the folder, or None. Raises OSError if that cannot be determined."""
        try:
            is_same = os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return f"{self.folder} was deleted while this job writes there"
        content = os.pread(self._file.fileno(), _LARGEST, 0) if is_same else self.path.read_bytes()[:_LARGEST]
        owner = json_object_or_empty(content)
        if owner.get("token") == self._own["token"]:
            return None
        return f"{self.folder} was taken over by {_described(owner)}"

    def _claim(self, say: Callable[[str], None], wait_seconds: float) -> None:
        began = time.monotonic()
        has_waited = False
        while (owner := self._try_to_claim()) is not None:
            is_silent = owner.pop("age") > SILENT_SECONDS
            limit = max(wait_seconds, LOCKED_SECONDS) if is_silent and wait_seconds else wait_seconds
            if time.monotonic() - began > limit:
                silence = ", although its heartbeat is old" if is_silent else ""
                raise UserError(
                    f"{self.folder} is in use by {_described(owner)}{silence}: two jobs that write to one folder would"
                    " destroy each other's files; end that one, or give another folder",
                    scope="job",
                )
            if not has_waited:
                say(f"waiting for the end of {_described(owner)}, which writes to {self.folder}")
                has_waited = True
            time.sleep(0.2)

    def _try_to_claim(self) -> dict[str, Any] | None:
        """Try to claim the folder; returns None, or the live owner with the ``age`` of its heartbeat in seconds."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = open_to_change(self.path)
            owner = self._claim_file()
        except OSError as error:
            if isinstance(error, PermissionError) and self.path.exists():
                raise UserError(
                    f"{self.path} cannot be written ({error.strerror}): another user's job writes there, or was killed;"
                    " delete the file once that job has ended, or give another folder"
                ) from error
            raise UserError(
                f"{self.folder} cannot be written ({error.strerror}); expected a folder for this job's files"
            ) from error
        if owner is not None:
            self._file.close()
        return owner

    def _claim_file(self) -> dict[str, Any] | None:
        descriptor, has_locks = self._file.fileno(), True
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                return json_object_or_empty(os.pread(descriptor, _LARGEST, 0)) | {"age": self._age()}
            has_locks = False
        try:
            if not os.path.samestat(self.path.stat(), os.fstat(descriptor)):
                return {"age": 0.0}  # the previous owner has just removed the file: try again
        except FileNotFoundError:
            return {"age": 0.0}
        owner = json_object_or_empty(os.pread(descriptor, _LARGEST, 0))
        has_ended = not owner or (has_locks and owner.get("boot") == self._own["boot"])  # here, it would hold the lock
        if not has_ended and (age := self._age()) <= SILENT_SECONDS:
            return owner | {"age": age}
        content = json.dumps(self._own, indent=1).encode() + b"\n"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)
        os.fsync(descriptor)
        if not has_locks:
            time.sleep(2.0)  # another process may claim it at the same moment: the last writer wins
            if (now := json_object_or_empty(os.pread(descriptor, _LARGEST, 0))).get("token") != self._own["token"]:
                return now | {"age": 0.0}
        return None

    def _age(self) -> float:
        """Seconds since the file's last modification, by the file server's clock."""
        probe = temporary_path(self.path)
        try:
            probe.touch()
            return probe.stat().st_mtime - self.path.stat().st_mtime
        except FileNotFoundError:  # the owner has just ended
            return 0.0
        finally:
            probe.unlink(missing_ok=True)


class OwnedFolders:
    """Ownership of several folders, duplicates by resolved path claimed once. A context manager."""

    def __init__(self, folders: Sequence[str], say: Callable[[str], None]) -> None:
        with ExitStack() as claimed:
            self._owners: dict[Path, FolderOwner] = {}
            for folder in folders:
                if (key := Path(folder).resolve()) not in self._owners:
                    self._owners[key] = FolderOwner(Path(folder), say)
                    claimed.callback(self._owners[key].release)
            self._claimed = claimed.pop_all()

    @property
    def lost(self) -> str | None:
        """Why this job no longer owns one of them; None while it owns all."""
        return next((owner.lost for owner in self._owners.values() if owner.lost is not None), None)

    def require(self, folder: Path) -> None:
        """As ``FolderOwner.require``."""
        if (owner := self._owners.get(folder.resolve())) is not None:
            owner.require()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._claimed.close()


def _own_entry() -> dict[str, Any]:
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID") or ("" if run == "none" else run),
        "since": datetime.now().isoformat(" ", "seconds"),
        "boot": boot_id(),
        "token": uuid.uuid4().hex,
    }


def _described(owner: dict[str, Any]) -> str:
    if not owner:
        return "another job"
    job = f"job {owner['job']}, " if owner.get("job") else ""
    return one_line(f"process {owner.get('pid')} on {owner.get('host')} ({job}since {owner.get('since')})", 300)
