"""Arrays of a step, in buffers that are used again for every step.

The arrays have the names and shapes of the models' `Batch` and of the inputs of the entry `sample`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.blocks import BlockManager
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.pages import NULL_PAGE
from kernelcat.moe.engine.request import Request
from kernelcat.moe.engine.step import Step

Array = npt.NDArray[Any]
Allocate = Callable[[tuple[int, ...], str], Array]
"""Makes an array of zeros from a shape and an element type: NumPy's, or views of pinned memory."""

PARAMETERS = {
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "min_p": "float32",
    "repetition_penalty": "float32",
}
"""Sampling parameters that each row has."""


class StepArrays:
    """Buffers for the largest step, and views of the parts that the last filled step uses.

    Parameters
    ----------
    manager, limits : the scheduler's
    num_drafts : draft tokens of a request in a step, at most
    allocate : makes the buffers

    Attributes
    ----------
    tokens : int32 (tokens,) ids of the new tokens
    source_rows : int32 (tokens,) -1, or the row of the step before that chooses the token
    positions : int32 (tokens,) places of the new tokens in their sequences
    block_tables : for each layer group int32 (batch, table_width); entries after a sequence's last
        page are garbage
    kv_lens : int32 (batch,) tokens of each sequence, new ones included
    cu_q : int32 (batch + 1,) new tokens of sequence s are ``cu_q[s]`` to ``cu_q[s + 1] - 1``
    rows : int32 (rows,) the new tokens after which a token is chosen
    temperature, top_k, top_p, min_p, repetition_penalty : (rows,) of the requests
    seed, offset : int64 (rows,) of the draws; offset is the position of the token that is chosen
    """

    tokens: Array
    source_rows: Array
    positions: Array
    block_tables: tuple[Array, ...]
    kv_lens: Array
    cu_q: Array
    rows: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    seed: Array
    offset: Array

    def __init__(
        self,
        manager: BlockManager,
        limits: Limits,
        num_drafts: int = 0,
        allocate: Allocate = np.zeros,
    ) -> None:
        self._page_size = manager.page_size
        batch, tokens = limits.max_running, limits.step_tokens
        rows = min(tokens, batch * (1 + num_drafts))
        self._by_token = {
            name: allocate((tokens,), "int32") for name in ("tokens", "source_rows", "positions")
        }
        self._by_row = {"rows": allocate((rows,), "int32")}
        self._by_row |= {name: allocate((rows,), dtype) for name, dtype in PARAMETERS.items()}
        self._by_row |= {name: allocate((rows,), "int64") for name in ("seed", "offset")}
        self._kv_lens = allocate((batch,), "int32")
        self._cu_q = allocate((batch + 1,), "int32")
        shape = len(manager.groups), batch, manager.table_width
        self._tables = allocate(shape, "int32")
        self._show(0, 0, 0)

    def _show(self, batch: int, tokens: int, rows: int) -> None:
        """Makes the attributes views of the first parts of the buffers."""
        for name, buffer in self._by_token.items():
            setattr(self, name, buffer[:tokens])
        for name, buffer in self._by_row.items():
            setattr(self, name, buffer[:rows])
        self.kv_lens = self._kv_lens[:batch]
        self.cu_q = self._cu_q[: batch + 1]
        self.block_tables = tuple(self._tables[:, :batch])

    def fill(self, step: Step, batch: int = 0) -> None:
        """Writes the arrays of ``step``, which was planned last.

        Parameters
        ----------
        step : what `Scheduler.schedule` returned
        batch : sequences to pad the step to, for a CUDA graph of that size; 0 for no padding. The
            padding are sequences of one token in the null page, greedy, one row each.

        Raises
        ------
        InvalidArgument
            A step with other chunks than single tokens is padded, or ``batch`` is too small or too
            large.
        """
        chunks, size = step.chunks, len(step.chunks)
        num_padded = self._num_padded(step, batch)
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        cu_q = [0]
        for s, chunk in enumerate(chunks):
            tokens += chunk.tokens
            positions += range(chunk.start, chunk.end)
            cu_q.append(len(tokens))
            rows += range(len(tokens) - chunk.num_rows, len(tokens))
            table = chunk.request.table
            assert table is not None
            self._tables[:, s, : table.num_blocks] = table.pages[:, : table.num_blocks]
        self._show(size + num_padded, len(tokens) + num_padded, len(rows) + num_padded)
        padded = [i % self._page_size for i in range(num_padded)]
        first = len(tokens)
        self._write("tokens", tokens + [0] * num_padded)
        self._write("positions", positions + padded)
        self._write("rows", rows + list(range(first, first + num_padded)))
        self._write("cu_q", cu_q + [first + 1 + i for i in range(num_padded)])
        self._write("kv_lens", [chunk.end for chunk in chunks] + [at + 1 for at in padded])
        sources = self._by_token["source_rows"]
        sources[: first + num_padded] = -1
        for chunk, row in zip(chunks, cu_q, strict=False):
            if chunk.source_row >= 0:
                sources[row] = chunk.source_row
        self._tables[:, size : size + num_padded, 0] = NULL_PAGE
        owners = [chunk.request for chunk in chunks for _ in range(chunk.num_rows)]
        offsets = [positions[row] + 1 for row in rows]
        self._write_parameters(owners, offsets, num_padded)

    def _num_padded(self, step: Step, batch: int) -> int:
        """Sequences to add, or InvalidArgument."""
        size = len(step.chunks)
        if not batch or batch == size:
            return 0
        if step.max_q > 1 or step.num_rows != size:
            raise InvalidArgument(
                f"step {step.index} is not padded to {batch} sequences: "
                "only steps whose requests have one new token and one row each can be padded"
            )
        if not size < batch <= len(self._kv_lens):
            raise InvalidArgument(
                f"step {step.index} has {size} sequences and cannot be padded to {batch}; "
                f"the limit is max_running={len(self._kv_lens)}"
            )
        return batch - size

    def _write(self, name: str, values: list[Any]) -> None:
        """Writes a whole array."""
        getattr(self, name)[:] = values

    def _write_parameters(self, owners: list[Request], offsets: list[int], num_padded: int) -> None:
        """Writes what rows need to choose a token; padded rows are greedy."""
        padding = {"top_p": 1.0, "repetition_penalty": 1.0}
        for name in PARAMETERS:
            values = [getattr(request.parameters, name) for request in owners]
            self._write(name, values + [padding.get(name, 0)] * num_padded)
        self._write("seed", [request.seed for request in owners] + [0] * num_padded)
        self._write("offset", offsets + [0] * num_padded)
