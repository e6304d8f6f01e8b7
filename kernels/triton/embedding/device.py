"""Triton kernel of `embedding`: ROWS x COLS elements of out a program."""

import triton
import triton.language as tl


@triton.jit
def gather(
    ids,  # (tokens,) int32 or int64
    table,  # (vocab, hidden)
    out,  # (tokens, hidden)
    tokens, vocab, hidden, scale, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Rows of the table, times scale; rows whose id lies outside of the table are not read."""
    tiles_across = tl.cdiv(hidden, COLS)
    rows = tl.program_id(0) // tiles_across * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) % tiles_across * COLS + tl.arange(0, COLS)
    inside = (rows < tokens)[:, None] & (cols < hidden)[None, :]
    row_ids = tl.load(ids + rows, mask=rows < tokens, other=-1).to(tl.int64)
    is_valid = (row_ids >= 0) & (row_ids < vocab)
    source = table + row_ids[:, None] * hidden + cols[None, :]
    values = tl.load(source, mask=inside & is_valid[:, None], other=0.0).to(tl.float32) * scale
    target = out + rows[:, None].to(tl.int64) * hidden + cols[None, :]
    tl.store(target, values.to(out.dtype.element_ty), mask=inside)
