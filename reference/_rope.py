"""RoPE: rotation of pairs of elements by an angle for each position.

Each pair (x, y) of the first ``rotary_dim`` elements of a head becomes

    (x * cos - y * sin, y * cos + x * sin)

and the other elements stay. In style "neox" elements i and i + rotary_dim / 2 are a pair, in style
"interleaved" elements 2 i and 2 i + 1. cos_sin (positions, rotary_dim) has the cosines of a
position's rotary_dim / 2 angles, then their sines.

Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021.
"""

from __future__ import annotations

from kernelcat.catalog.spec import Axis, Tensor, any_size
from kernelcat.reference._arrays import library_of

STYLES = ("neox", "interleaved")
STYLE_DOC = "elements that are a pair: i and i + rotary_dim / 2, or 2 i and 2 i + 1"

POSITIONS = Axis.size(
    "positions",
    "rows of cos_sin: positions that a token may have",
    0,
    300,
    any_size,
    varies=True,
)
COS_SIN = Tensor(
    "cos_sin", ("positions", "rotary_dim"), "float32",
    "of each position rotary_dim / 2 cosines, then as many sines",
)  # fmt: skip


def draw_cos_sin(problem, normal, positions):
    """cos_sin of random angles, with NaN in all rows but ``positions`` (tokens,)."""
    angles = 3.0 * normal((problem["positions"], problem["rotary_dim"] // 2))
    xp = library_of(angles)
    cos_sin = xp.concatenate((xp.cos(angles), xp.sin(angles)), axis=1)
    poisoned = xp.full_like(cos_sin, xp.nan)
    if problem["rotary_dim"]:
        poisoned[positions] = cos_sin[positions]
    return poisoned


def rotate(problem, x, cos_sin, positions):
    """x (tokens, heads, head_dim) rotated by rows ``positions`` (tokens,) of cos_sin."""
    rotary_dim, half = problem["rotary_dim"], problem["rotary_dim"] // 2
    if not rotary_dim:
        return x
    first, second = slice(0, half), slice(half, rotary_dim)
    if problem["style"] == "interleaved":
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    cos, sin = cos_sin[positions, None, :half], cos_sin[positions, None, half:]
    rotated = x.copy()
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., second] * cos + x[..., first] * sin
    return rotated
