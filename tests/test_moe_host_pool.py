"""Slots of host memory under random histories, against a plain model of them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kernelcat.moe.engine.host_pool import HostPool

VALUES = st.sampled_from([bytes([i]) for i in range(8)])


class HostPoolMachine(RuleBasedStateMachine):
    """``order`` has the hashes, least recently used first; ``reserved`` those on their way."""

    pool: HostPool
    order: list[bytes]
    reserved: dict[bytes, int]
    readers: dict[bytes, int]

    @initialize(num_slots=st.integers(1, 5))
    def start(self, num_slots):
        self.pool = HostPool(num_slots)
        self.order, self.reserved, self.readers = [], {}, {}

    def use(self, value):
        self.order.remove(value)
        self.order.append(value)

    @rule(value=VALUES)
    def reserve(self, value):
        stored = [v for v in self.order if v not in self.reserved and not self.readers.get(v)]
        slot = self.pool.reserve(value)
        if value in self.order:
            assert slot is None
            self.use(value)
        elif len(self.order) < self.pool.num_slots or stored:
            assert slot is not None and slot not in self.reserved.values()
            if len(self.order) == self.pool.num_slots:
                self.order.remove(stored[0])
            self.order.append(value)
            self.reserved[value] = slot
        else:
            assert slot is None

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), is_stored=st.booleans())
    def end(self, data, is_stored):
        value = data.draw(st.sampled_from(sorted(self.reserved)))
        del self.reserved[value]
        if is_stored:
            self.pool.store(value)
        else:
            self.pool.drop(value)
            self.order.remove(value)

    @precondition(lambda self: set(self.order) - set(self.reserved))
    @rule(data=st.data())
    def lock(self, data):
        value = data.draw(st.sampled_from(sorted(set(self.order) - set(self.reserved))))
        self.pool.lock(value)
        self.use(value)
        self.readers[value] = self.readers.get(value, 0) + 1

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def unlock(self, data):
        value = data.draw(st.sampled_from(sorted(self.readers)))
        self.pool.unlock(value)
        self.readers[value] -= 1
        if not self.readers[value]:
            del self.readers[value]

    @precondition(lambda self: not self.reserved and not self.readers)
    @rule()
    def forget(self):
        self.pool.forget_blocks()
        self.order.clear()

    @invariant()
    def agrees(self):
        if hasattr(self, "pool"):
            assert self.pool.faults(self.reserved, self.readers) == []
            assert self.pool.num_used == len(self.order)
            for value in (bytes([i]) for i in range(8)):
                assert self.pool.knows(value) == (
                    value in self.order and value not in self.reserved
                )


TestHostPool = HostPoolMachine.TestCase
TestHostPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def lose_a_slot(pool):
    pool._free.pop()


def give_a_slot_twice(pool):
    pool._free.append(pool._entries[b"a"].slot)


def forget_a_reader(pool):
    pool._entries[b"a"].num_readers = 0


def store_too_early(pool):
    pool.store(b"b")


def read_an_empty_slot(pool):
    pool._entries[b"a"].is_stored = False


@pytest.mark.parametrize(
    "plant", [lose_a_slot, give_a_slot_twice, forget_a_reader, store_too_early, read_an_empty_slot]
)
def test_each_planted_fault_is_found(plant):
    pool = HostPool(4)
    pool.reserve(b"a")
    pool.store(b"a")
    pool.lock(b"a")
    reserved = {b"b": pool.reserve(b"b")}
    assert pool.faults(reserved, {b"a": 1}) == []
    plant(pool)
    assert pool.faults(reserved, {b"a": 1})
