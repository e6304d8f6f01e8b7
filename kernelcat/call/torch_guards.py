"""Dynamo's tensor guards: one call compares several tensors with expected types and layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def find(torch: Any) -> Any:
    """Dynamo's class of tensor guards, or None where this torch has no such class that works.

    A guard compares three tensors in 0.5 us, where ``Torch.scan`` takes 2. The class is private to
    torch, so it is tried out first: a guard must accept a tensor like the expected one, and refuse
    tensors that differ in any one property.
    """
    try:
        guards = torch._C._dynamo.guards.TensorGuards
        expected = torch.empty(4, 4)
        matches = make(guards, (expected,))
        different = (
            expected[:2], expected[:, :2], expected.t(), expected.half(), expected.to("meta"),
            torch.nn.Parameter(expected), torch.empty(4, 8)[:, :4], None,
        )  # fmt: skip
        works = matches(torch.empty(4, 4)) and not any(matches(other) for other in different)
    except Exception:  # this torch has no TensorGuards, or one with another interface
        return None
    return guards if works else None


def make(guards: Any, arrays: Sequence[Any]) -> Callable[..., bool]:
    """A predicate ``matches(*others)``: others have the types, layouts and devices of ``arrays``.

    ``guards`` is the class that :func:`find` returns.
    """
    guard = guards(
        *arrays,
        dynamic_dims_sizes=[list(x.shape) for x in arrays],
        dynamic_dims_strides=[list(x.stride()) for x in arrays],
    )
    check: Callable[..., bool] = guard.check
    return check
