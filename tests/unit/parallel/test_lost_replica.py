"""Which errors of collectives mean a lost rank, and the message that is reported."""

from __future__ import annotations

import pytest

from megatron01.parallel.process_groups import format_places, lost_replica

PLACE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] "
CALLBACK = "Got the following error when running the callback: RuntimeError: "
AT = "\n\nAt:\n  /somewhere/megatron01/optim/adam.py(51): <lambda>\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (PLACE + "Connection closed by peer [127.0.0.1]:1234", "Connection closed by peer [127.0.0.1]:1234"),
        (PLACE + "Application timeout caused pair closure", "Application timeout caused pair closure"),
        # through the hook of DistributedDataParallel, which drops the source location
        (CALLBACK + "Application timeout caused pair closure" + AT, "Application timeout caused pair closure"),
        (CALLBACK + "Timed out waiting 9000ms for send operation to complete" + AT,
         "Timed out waiting 9000ms for send operation to complete"),
        (CALLBACK + "Read error [10.0.0.2]:1234: Connection timed out" + AT,
         "Read error [10.0.0.2]:1234: Connection timed out"),
        (CALLBACK + "writev [10.0.0.2]:1234: No route to host" + AT, "writev [10.0.0.2]:1234: No route to host"),
    ],
)  # fmt: skip
def test_a_lost_peer_is_told_in_one_line(text: str, told: str) -> None:
    assert lost_replica(RuntimeError(text)) == f"RuntimeError: {told}"


def test_other_errors_are_none_of_its_business() -> None:
    assert lost_replica(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)")) is None


def test_of_many_lost_ranks_eight_are_named() -> None:
    hosts = [f"node{rank}" for rank in range(10)]
    assert format_places([1, 3], hosts) == "rank 1 on node1, rank 3 on node3"
    assert format_places(range(10), hosts).endswith("rank 6 on node6, rank 7 on node7 and 2 more")
