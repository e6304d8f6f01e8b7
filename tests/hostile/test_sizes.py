"""Sizes that do not fit into 32 bits are refused, and never wrap to other sizes."""

from __future__ import annotations

import pytest

from kernelcat import catalog
from kernelcat.catalog.axes import SIZE_LIMIT
from kernelcat.catalog.implementation import Int32
from kernelcat.errors import InvalidArgument, Unsupported

SIZES = [
    (name, axis.name)
    for name in catalog.names()
    for axis in catalog.entry(name).axes
    if not axis.values and not axis.is_number
]


@pytest.mark.parametrize(("name", "axis"), SIZES)
@pytest.mark.parametrize("factor", [1, 2, 10**400])
def test_every_size_of_every_entry_has_a_limit(name: str, axis: str, factor: int) -> None:
    entry = catalog.entry(name)
    problem = next(iter(entry.problems.values()))
    step, limit = entry.axis(axis).step, entry.axis(axis).limit
    assert limit == SIZE_LIMIT or name == "tma_copy"
    size = factor * limit // step * step + step
    with pytest.raises(InvalidArgument, match=rf"{axis}=.* must be less than 2\*\*") as caught:
        entry.problem(**{**problem.values, axis: size})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1, 1 << 40])
def test_no_parameter_of_32_bits_wraps(value: int) -> None:
    with pytest.raises(Unsupported, match="does not fit into a parameter of 32 bits"):
        Int32(value)
