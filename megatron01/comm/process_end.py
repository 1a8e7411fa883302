"""Keeps a process whose last work was a collective from aborting when it ends.

A thread of gloo lets go of a collective's tensors after it has woken whoever waits for them, and needs Python's lock to
do so (torch 2.13). A script that ends with a collective can be through its last line by then; the interpreter then ends
the thread where it asks for the lock, in the middle of a C++ destructor, and the process aborts: "terminate called
without an active exception", an exit status of -6, and a launcher that reports a failure of work that is done. So the
main thread stands back for a moment before the interpreter is torn down.

It makes no difference whether the script calls ``destroy_process_group()``: other places of torch keep the group. Doing
without those would not help either, as destroying a group waits for its threads, and where ``DistributedDataParallel``
is the last to hold it, does so with the lock that they ask for.
"""

from __future__ import annotations

import time

SECONDS = 0.1
"""Letting go takes microseconds; this leaves the threads time to get a core on a machine that is busy."""


def let_threads_finish() -> None:
    """For ``atexit``: stand back, without the lock."""
    time.sleep(SECONDS)
