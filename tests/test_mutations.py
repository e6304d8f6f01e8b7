"""Right results of every entry with one planted fault: the gate must find each fault."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from campaign import share
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kernelcat import catalog, dtypes
from kernelcat.catalog.spec import EXACT, Problem
from kernelcat.runtime import gpu
from kernelcat.verify import fuzz, gate
from kernelcat.verify.gate import Prepared

pytestmark = pytest.mark.campaign

HOST = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)
LIMIT = 140
"""Largest drawn size: more than 128, the length of the largest quantization blocks."""


def write_the_oracle(prepared: Prepared) -> None:
    for name, expected in prepared.expected.items():
        if name not in prepared.buffers:
            continue  # an optional output that the problem does not ask for
        dtype = prepared.buffers[name].tensor.dtype_of(prepared.problem)
        stored = expected.dtype == dtypes.STORAGE[dtype] and expected.dtype != np.float32
        prepared.arrays[name][...] = expected if stored else dtypes.encode(expected, dtype)


def an_element(array: Any, dice: random.Random) -> tuple[int, ...]:
    return tuple(dice.randrange(size) for size in array.shape)


def an_output(prepared: Prepared, dice: random.Random) -> tuple[Any, Any]:
    """A random output that has elements, and its array."""
    outputs = [(t, prepared.arrays[t.name]) for t in prepared.entry.outputs
             if t.present(prepared.problem) and prepared.arrays[t.name].size]  # fmt: skip
    assume(outputs)
    return dice.choice(outputs)


def bits(array: Any) -> Any:
    return array.view(f"uint{8 * array.dtype.itemsize}")


def spoil_an_element(prepared: Prepared, dice: random.Random) -> None:
    """Moves an element just beyond its tolerance, or flips a bit of an exact element."""
    tensor, array = an_output(prepared, dice)
    tolerance = prepared.entry.tolerance_of(prepared.problem, tensor)
    at, dtype = an_element(array, dice), tensor.dtype_of(prepared.problem)
    if tolerance == EXACT:
        bits(array)[at] ^= 1 << dice.randrange(8 * array.dtype.itemsize)
        return
    expected = float(prepared.expected[tensor.name][at])
    assume(np.isfinite(expected))
    allowed = tolerance.absolute + tolerance.relative * abs(expected)
    wrong = expected + dice.choice((-1, 1)) * dice.uniform(1.1, 3) * allowed
    array[at] = dtypes.encode(np.array([wrong], dtype="float32"), dtype)[0]
    assume(abs(float(dtypes.decode(array[at], dtype)) - expected) > 1.01 * allowed)


def forget_an_element(prepared: Prepared, dice: random.Random) -> None:
    """Restores the value that an element had before the run."""
    tensor, array = an_output(prepared, dice)
    before = prepared.pristine[tensor.name] if tensor.updated else np.full_like(array, 0)
    if not tensor.updated:
        bits(before)[...] = (1 << 8 * array.dtype.itemsize) - 1
    is_wrong = bits(before) != bits(array)
    tolerance = prepared.entry.tolerance_of(prepared.problem, tensor)
    if tolerance != EXACT:  # an old value may be close to the new one
        expected = prepared.expected[tensor.name].astype("float32")
        old = dtypes.decode(before, tensor.dtype_of(prepared.problem))
        allowed = tolerance.absolute + tolerance.relative * abs(expected)
        is_wrong &= ~(abs(old - expected) <= 1.01 * allowed)  # NaN is wrong
    written = np.argwhere(is_wrong)
    assume(len(written))
    at = tuple(written[dice.randrange(len(written))])
    array[at] = before[at]


def change_an_input(prepared: Prepared, dice: random.Random) -> None:
    """Flips a bit of an input."""
    inputs = [a for t in prepared.entry.inputs
             if t.present(prepared.problem) and (a := prepared.arrays[t.name]).size]  # fmt: skip
    assume(inputs)
    array = dice.choice(inputs)
    bits(array)[an_element(array, dice)] ^= 1 << dice.randrange(8 * array.dtype.itemsize)


def write_beside(prepared: Prepared, dice: random.Random) -> None:
    """Flips a bit of a guard band."""
    present = [tensor.name for tensor in prepared.entry.present(prepared.problem)]
    buffer = prepared.buffers[dice.choice(present)]
    place = dice.randrange(gate.GUARD_BYTES)
    buffer.raw[place if dice.random() < 0.5 else buffer.raw.size - 1 - place] ^= 1


@pytest.mark.parametrize(
    "spoil", [spoil_an_element, forget_an_element, change_an_input, write_beside],
    ids=lambda spoil: spoil.__name__,
)  # fmt: skip
@pytest.mark.parametrize("name", catalog.names())
def test_the_gate_finds_every_planted_fault(name: str, spoil: Any) -> None:
    entry = catalog.entry(name)

    @settings(
        max_examples=share(100), deadline=None,
        suppress_health_check=[HealthCheck.filter_too_much],  # problems without elements
    )  # fmt: skip
    @given(problem=fuzz.problems(entry, limit=LIMIT), seed=st.integers(0, 1 << 30))
    def run(problem: Problem, seed: int) -> None:
        prepared = gate.prepare(entry, problem, HOST, seed % 7)
        assert prepared.verify_run(lambda: write_the_oracle(prepared)).passed

        def wrong() -> None:
            write_the_oracle(prepared)
            spoil(prepared, random.Random(seed))

        assert not prepared.verify_run(wrong).passed

    run()
