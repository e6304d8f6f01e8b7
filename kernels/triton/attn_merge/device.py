"""Triton kernel of `attn_merge`; a row is a query token and one of its heads."""

import triton
import triton.language as tl


@triton.jit
def merge(
    outs,  # (parts, num_rows, HEAD_DIM)
    lses,  # (parts, num_rows)
    out,  # (num_rows, HEAD_DIM)
    lse,  # (num_rows,)
    parts, num_rows, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of ROWS rows in one pass, as an online softmax over log-sum-exps does."""
    row, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    inside = row < num_rows
    row = row.to(tl.int64)
    row_max, row_sum = tl.full((ROWS,), -1.0e30, tl.float32), tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    part_row = row
    for _ in range(parts):
        part_lse = tl.load(lses + part_row, mask=inside, other=float("-inf"))
        has_keys = part_lse > float("-inf")  # without keys outs may hold NaN
        values = outs + part_row[:, None] * HEAD_DIM + dims[None, :]
        part_out = tl.load(values, mask=has_keys[:, None], other=0.0).to(tl.float32)
        part_row += num_rows
        new_max = tl.maximum(row_max, part_lse)
        rescale, weight = tl.exp(row_max - new_max), tl.exp(part_lse - new_max)
        row_sum = row_sum * rescale + weight
        acc = acc * rescale[:, None] + part_out * weight[:, None]
        row_max = new_max
    has_keys = row_sum > 0.0
    row_sum = tl.where(has_keys, row_sum, 1.0)
    result = (acc / row_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * HEAD_DIM + dims[None, :], result, mask=inside[:, None])
    row_lse = tl.where(has_keys, tl.log(row_sum) + row_max, float("-inf"))
    tl.store(lse + row, row_lse, mask=inside)
