"""Triton kernels of `attn_merge`: outs (parts, rows, head_dim) and lses (parts, rows) of all rows,
which are query tokens times heads, become out (rows, head_dim) and lse (rows)."""

import triton
import triton.language as tl


@triton.jit
def merge(outs, lses, out, lse, parts, num_rows, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows a program; one pass, with sums relative to the largest lse so far."""
    row, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    inside = row < num_rows
    at = row.to(tl.int64)
    most, total = tl.full((ROWS,), -1.0e30, tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    its_at = at
    for _ in range(parts):
        its_lse = tl.load(lses + its_at, mask=inside, other=float("-inf"))
        seen = its_lse > float("-inf")
        values = outs + its_at[:, None] * HEAD_DIM + dims[None, :]
        its_out = tl.load(values, mask=seen[:, None], other=0.0).to(tl.float32)
        its_at += num_rows
        highest = tl.maximum(most, its_lse)
        kept, weight = tl.exp(most - highest), tl.exp(its_lse - highest)
        total = total * kept + weight
        acc = acc * kept[:, None] + its_out * weight[:, None]
        most = highest
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * HEAD_DIM + dims[None, :], result, mask=inside[:, None])
    tl.store(lse + at, tl.where(seen, tl.log(total) + most, float("-inf")), mask=inside)
