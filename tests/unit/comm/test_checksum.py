from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron01.comm.payload import broken_rows, digest, seal
from megatron01.comm.transport import CheckedTransport, DamagedPayload, Done


def sealed_rows(num_rows: int, num_words: int, seed: int = 0) -> torch.Tensor:
    rows = torch.randint(
        256, (num_rows, 4 * num_words), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    seal(rows)
    return rows


@settings(deadline=None)  # the first call compiles
@given(num_rows=st.integers(1, 4), num_words=st.integers(4, 70), seed=st.integers(0, 1000), data=st.data())
def test_any_flipped_bit_is_found_in_its_row(num_rows, num_words, seed, data):
    rows = sealed_rows(num_rows, num_words, seed)
    assert broken_rows(rows) == []
    seal(rows)  # sealing again changes nothing
    assert broken_rows(rows) == []
    row, byte, bit = (data.draw(st.integers(0, most - 1)) for most in (num_rows, 4 * num_words, 8))
    rows[row, byte] ^= 1 << bit
    assert broken_rows(rows) == [row]


@settings(deadline=None)
@given(num_bytes=st.sampled_from([1, 3, 4, 1 << 20, (1 << 20) + 1, (1 << 21) + 6]), data=st.data())
def test_any_flipped_bit_changes_the_digest(num_bytes, data):
    buffers = {"x": torch.zeros(num_bytes, dtype=torch.uint8), "v": torch.arange(5.0)}
    before = digest(buffers)
    assert digest(dict(reversed(buffers.items()))) == before
    byte, bit = data.draw(st.integers(0, num_bytes - 1)), data.draw(st.integers(0, 7))
    buffers["x"][byte] ^= 1 << bit
    assert digest(buffers) != before


def test_the_digest_tells_buffers_apart():
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    digests = {digest({"x": one, "v": two}), digest({"x": two, "v": one}), digest({"x": one}), digest({})}
    assert len(digests) == 4
    assert digest({"x": one.to(torch.float64)}) != digest({"x": one})
    assert digest({"x": torch.ones(4, 3).t()}) == digest({"x": torch.ones(3, 4)})


def test_the_largest_words_wrap_round():
    rows = torch.full((2, 4000), 255, dtype=torch.uint8)
    seal(rows)
    assert broken_rows(rows) == []


def test_rows_may_be_parts_of_longer_ones():
    whole = torch.randint(256, (3, 64), dtype=torch.uint8)
    before = whole.clone()
    rows = whole[:, :32]
    seal(rows)
    assert broken_rows(rows) == [] and torch.equal(whole[:, 32:], before[:, 32:])


def test_no_rows_at_all():
    rows = torch.empty(0, 32, dtype=torch.uint8)
    seal(rows)
    assert broken_rows(rows) == []


class Mirror:
    """A transport to itself, as if replica 1 had sent the same; ``damage`` flips a bit on the way."""

    rank, size, bytes_sent, rounds, damage = 0, 2, 0, 0, False

    def all_to_all(self, received, sent):
        received.copy_(sent)
        received[1, -1] ^= self.damage
        self.bytes_sent += sent.nbytes // 2
        return Done()

    def all_gather(self, received, sent):
        received.copy_(sent.expand(2, -1))
        received[1, 0] ^= self.damage
        return Done()

    def count_round(self):
        self.rounds += 1


@pytest.mark.parametrize("damage", [False, True])
def test_a_transport_that_damages_is_found_out(damage):
    mirror = Mirror()
    mirror.damage = damage
    transport = CheckedTransport(mirror)
    rows, received = torch.randint(256, (2, 64), dtype=torch.uint8), torch.zeros(2, 64, dtype=torch.uint8)
    for collective, sent in ((transport.all_to_all, rows), (transport.all_gather, rows[0])):
        work = collective(received, sent)
        if damage:
            with pytest.raises(DamagedPayload, match=r"from replicas \[1\]"):
                work.wait()
        else:
            work.wait()
    transport.count_round()
    assert (transport.bytes_sent, transport.rounds) == (64, 1) == (mirror.bytes_sent, mirror.rounds)
    transport.bytes_sent = transport.rounds = 0
    assert (mirror.bytes_sent, mirror.rounds) == (0, 0)
