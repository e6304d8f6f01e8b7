"""`embedding`: drawn ids reach rows outside of the table, and rows without an id are poison."""

from __future__ import annotations

import numpy as np

from kernelcat import catalog
from kernelcat.verify import gate

ENTRY = catalog.entry("embedding")


def problem_of(id_dtype: str):
    return ENTRY.problem(tokens=200, vocab=50, hidden=8, dtype="bfloat16", id_dtype=id_dtype)


def test_drawn_ids_lie_on_both_sides_of_the_table() -> None:
    for id_dtype in ("int32", "int64"):
        drawn = gate.drawn(ENTRY, problem_of(id_dtype), np)
        ids, table = drawn["ids"], drawn["table"]
        assert ids.dtype == id_dtype
        assert {-1, 50} <= set(ids.tolist())
        inside = ids[(ids >= 0) & (ids < 50)]
        assert len(inside) > 150
        assert np.array_equal(np.isnan(table).any(1), ~np.isin(np.arange(50), inside))


def test_some_int64_ids_lie_inside_if_they_are_truncated_to_32_bits() -> None:
    ids = gate.drawn(ENTRY, problem_of("int64"), np)["ids"]
    outside = ids[(ids < 0) | (ids >= 50)]
    assert (outside.astype("int32") == 0).any()


def test_rows_outside_of_the_table_are_zero() -> None:
    problem = problem_of("int32")
    ids = gate.drawn(ENTRY, problem, np)["ids"]
    prepared = gate.prepare(ENTRY, problem, type("Host", (), {"xp": np}))
    is_zero = (prepared.expected["out"] == 0).all(1)
    assert np.array_equal(is_zero, (ids < 0) | (ids >= 50))
