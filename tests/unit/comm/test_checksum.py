from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron01.comm.payload import damages, digest, seal
from megatron01.comm.transport import DamagedPayload, Done, Transport, read_checked


def sealed_rows(num_rows: int, num_words: int, seed: int = 0) -> torch.Tensor:
    rows = torch.randint(
        256, (num_rows, 4 * num_words), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    seal(rows)
    return rows


def broken_rows(rows: torch.Tensor) -> list[int]:
    return [row for row, damage in enumerate(damages(rows).tolist()) if damage]


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


class Mirror(Transport):
    """A loopback transport, as if replica 1 had sent the same; ``damage`` flips a bit in transit."""

    damage = False

    def _start(self, received, sent):
        received.copy_(sent.expand(2, -1))
        received[1, 0] ^= self.damage
        return Done()

    def broadcast(self, tensor): ...


@pytest.mark.parametrize("damage", [False, True])
def test_a_transport_that_damages_is_found_out(damage):
    transport = Mirror(0, 2, checks=True)
    transport.damage = damage
    values = torch.tensor([0.5, 7.0])
    rows, received = sealed_rows(2, 16), torch.zeros(2, 64, dtype=torch.uint8)
    for collective, sent in ((transport.all_to_all, rows), (transport.all_gather, rows[0])):
        collective(received, sent).wait()
        transport.check(received)
        if damage:
            with pytest.raises(DamagedPayload, match=r"replica 0 received from replicas \[1\]"):
                read_checked([values], transport)
        else:
            assert read_checked([values], transport) == [0.5, 7.0]
    assert (transport.bytes_sent, transport.rounds) == (128, 0) and not transport.unread_checks


def test_one_read_tells_the_damage_of_all_rows_that_were_checked():
    other, transport = Mirror(3, 2, checks=True), Mirror(0, 2, checks=True)
    received = torch.zeros(3, 2, 64, dtype=torch.uint8)
    for number, rows in enumerate(received):
        transport.damage = number == 1
        transport.all_to_all(rows, sealed_rows(2, 16, number))
    other.check(received[0])
    transport.check(received.view(6, 64))
    with pytest.raises(DamagedPayload, match=r"replica 0 received from replicas \[1\]"):
        read_checked([torch.zeros(1)], other, transport)
    assert read_checked([torch.ones(1)], other, transport) == [1.0]  # the damage has been reported already


def test_rows_keep_their_checksums_and_damages():
    transport, rows = Mirror(0, 2, checks=True), sealed_rows(2, 16)
    rows[1, 20] ^= 4
    sent, received = rows.clone(), torch.zeros_like(rows)
    for collective, one in ((transport.all_to_all, rows), (transport.all_gather, rows[1])):
        collective(received, one).wait()
        transport.check(received, found := damages(received))
        assert torch.equal(rows, sent) and found[1]
        with pytest.raises(DamagedPayload):
            read_checked([torch.zeros(1)], transport)


def test_a_transport_without_checks_leaves_rows_as_they_are():
    transport, rows = Mirror(0, 2), torch.full((2, 64), 7, dtype=torch.uint8)
    transport.damage = True
    received = torch.zeros_like(rows)
    transport.all_to_all(received, rows).wait()
    transport.check(received)
    assert (rows == 7).all() and read_checked([torch.ones(1)], transport) == [1.0]


def test_values_of_both_types_are_read_as_they_are_and_every_damage_counts():
    transport, rows = Mirror(0, 2, checks=True), sealed_rows(2, 16)
    doubles, column = torch.tensor([0.1, -0.0, 5e-324], dtype=torch.float64), torch.tensor([[1e-45, 2.0]] * 2)[:, 0]
    transport.check(rows)
    assert read_checked([column, doubles, column], transport) == [*column.tolist(), *doubles.tolist(), *column.tolist()]
    transport.check(rows, torch.tensor([0, -(2**31)], dtype=torch.int32))  # -0.0 as a float
    with pytest.raises(DamagedPayload, match=r"from replicas \[1\]"):
        read_checked([column], transport)
