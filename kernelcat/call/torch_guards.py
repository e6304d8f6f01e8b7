"""Dynamo's tensor guards: several tensors compared with what they must be, in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def proven(torch: Any) -> Any:
    """Dynamo's guard, which compares tensors in one step: 0.5 us for three, where ``scan`` takes 2.

    It is private to torch. So it is used only where it is there and proves itself: it must know
    a like tensor, and refuse every unlike one. None otherwise.
    """
    try:
        guards = torch._C._dynamo.guards.TensorGuards
        like = torch.empty(4, 4)
        matches = make(guards, (like,))
        unlike = (
            like[:2], like[:, :2], like.t(), like.half(), like.to("meta"), torch.nn.Parameter(like),
            torch.empty(4, 8)[:, :4], None,
        )  # fmt: skip
        proven = matches(torch.empty(4, 4)) and not any(matches(other) for other in unlike)
    except Exception:  # a torch in which it is gone or different
        return None
    return guards if proven else None


def make(guards: Any, arrays: Sequence[Any]) -> Callable[..., bool]:
    """``matches(*others)``: whether others have the types, layouts and devices of ``arrays``."""
    made = guards(
        *arrays,
        dynamic_dims_sizes=[list(x.shape) for x in arrays],
        dynamic_dims_strides=[list(x.stride()) for x in arrays],
    )
    check: Callable[..., bool] = made.check
    return check
