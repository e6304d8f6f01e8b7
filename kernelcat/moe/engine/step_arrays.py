"""Arrays of a step, in buffers that are used again for every step.

The arrays have the names and shapes of the models' `Batch` and of the inputs of the entry `sample`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.blocks import BlockManager
from kernelcat.moe.engine.pages import NULL_PAGE
from kernelcat.moe.engine.request import Request
from kernelcat.moe.engine.step import Step
from kernelcat.moe.engine.step_sizes import Size, StepSizes

Array = npt.NDArray[Any]
Allocate = Callable[[tuple[int, ...], str], Array]
"""Makes an array of zeros from a shape and an element type: NumPy's, or views of pinned memory."""

TABLE_ALIGNMENT = 4
"""Entries to a multiple of which a group's block table is padded: 16 bytes. A call copies an array
that begins elsewhere."""

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
    manager : the scheduler's
    sizes : of the engine's steps
    allocate : makes the buffers

    Attributes
    ----------
    size : of the step that was filled last
    tokens : int32 (tokens,) ids of the new tokens
    source_rows : int32 (tokens,) -1, or the row of the step before that chooses the token
    positions : int32 (tokens,) places of the new tokens in their sequences
    block_tables : for each layer group int32 (batch, table_width); entries after a sequence's last
        page are garbage
    kv_lens : int32 (batch,) tokens of each sequence, new ones included
    cu_q : int32 (batch + 1,) new tokens of sequence s are ``cu_q[s]`` to ``cu_q[s + 1] - 1``
    rows : int32 (rows,) the new tokens after which a token is chosen
    num_tokens : int32 (1,) new tokens of requests, which come before those that are added
    temperature, top_k, top_p, min_p, repetition_penalty : (rows,) of the requests
    seed, offset : int64 (rows,) of the draws; offset is the position of the token that is chosen
    """

    size: Size
    tokens: Array
    source_rows: Array
    positions: Array
    block_tables: tuple[Array, ...]
    kv_lens: Array
    cu_q: Array
    rows: Array
    num_tokens: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    seed: Array
    offset: Array

    def __init__(
        self, manager: BlockManager, sizes: StepSizes, allocate: Allocate = np.zeros
    ) -> None:
        self._page_size, self._largest = manager.page_size, sizes.largest
        self._capacity = min(manager.page_size * manager.table_width, sizes.context)
        batch, tokens, rows, _ = sizes.largest
        self._by_token = {
            name: allocate((tokens,), "int32") for name in ("tokens", "source_rows", "positions")
        }
        self._by_row = {"rows": allocate((rows,), "int32")}
        self._by_row |= {name: allocate((rows,), dtype) for name, dtype in PARAMETERS.items()}
        self._by_row |= {name: allocate((rows,), "int64") for name in ("seed", "offset")}
        self.num_tokens = allocate((1,), "int32")
        self._kv_lens = allocate((batch,), "int32")
        self._cu_q = allocate((batch + 1,), "int32")
        self._table_shape = len(manager.groups), manager.table_width
        # Filled from the beginning, so that what a step uses lies in one piece.
        self._entries = allocate((prod(self._table_storage(batch)),), "int32")
        self.show(Size(0, 0, 0, 0))

    def show(self, size: Size) -> None:
        """Makes the attributes views of the first parts of the buffers."""
        self.size = size
        for name, buffer in self._by_token.items():
            setattr(self, name, buffer[: size.tokens])
        for name, buffer in self._by_row.items():
            setattr(self, name, buffer[: size.rows])
        self.kv_lens = self._kv_lens[: size.batch]
        self.cu_q = self._cu_q[: size.batch + 1]
        groups, width = self._table_shape
        storage = self._table_storage(size.batch)
        padded = self._entries[: prod(storage)].reshape(storage)
        self._tables = padded[:, : size.batch * width].reshape(groups, size.batch, width)
        self.block_tables = tuple(self._tables)

    def _table_storage(self, batch: int) -> tuple[int, int]:
        """Groups, and entries of a group's table with its padding to `TABLE_ALIGNMENT`."""
        groups, width = self._table_shape
        return groups, -(-batch * width // TABLE_ALIGNMENT) * TABLE_ALIGNMENT

    def fill(self, step: Step, size: Size | None = None) -> None:
        """Writes the arrays of ``step``, which was planned last.

        Parameters
        ----------
        step : what `Scheduler.schedule` returned
        size : sizes to pad the step to; None for no padding. Added sequences have their tokens in
            the null page; added rows are greedy.

        Raises
        ------
        InvalidArgument
            ``size`` is smaller than the step or larger than the buffers, or there are tokens to add
            and no sequence that could have them.
        """
        added = self._added(step, size or Size.of(step))
        chunks = step.chunks
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
        owners = [chunk.request for chunk in chunks for _ in range(chunk.num_rows)]
        offsets = [positions[row] + 1 for row in rows]
        sources = {
            row: chunk.source_row
            for chunk, row in zip(chunks, cu_q, strict=False)
            if chunk.source_row >= 0
        }
        lengths = [chunk.end for chunk in chunks]
        self.num_tokens[:] = len(tokens)
        for start, end in added:
            tokens += [0] * (end - start)
            positions += range(start, end)
            cu_q.append(len(tokens))
            lengths.append(end)
        num_rows_added = self.size.rows - len(rows)
        last = len(tokens) - 1
        rows += [min(len(rows) + i, last) for i in range(num_rows_added)]
        self._write("tokens", tokens)
        self._write("positions", positions)
        self._write("rows", rows)
        self._write("cu_q", cu_q)
        self._write("kv_lens", lengths)
        self.source_rows[:] = -1
        for row, source in sources.items():
            self.source_rows[row] = source
        self._tables[:, len(chunks) :] = NULL_PAGE
        self._write_parameters(owners, offsets, num_rows_added)

    def _added(self, step: Step, size: Size) -> list[tuple[int, int]]:
        """First and last position of the new tokens of added sequences, or InvalidArgument."""
        own, largest = Size.of(step), self._largest
        if any(a > b for a, b in zip(own, size, strict=True)) or any(
            a > b for a, b in zip(size, largest, strict=True)
        ):
            raise InvalidArgument(
                f"step {step.index} has {own} and cannot be padded to {size}; the largest "
                f"possible size is {largest}"
            )
        self.show(size)
        count, num_tokens = size.batch - own.batch, size.tokens - own.tokens
        if size.is_decode and (own.is_decode or not own.batch):
            at = [i % min(self._page_size, self._capacity) for i in range(count)]
            return [(start, start + 1) for start in at]
        ends = []
        for _ in range(count):
            ends.append(min(num_tokens, self._capacity, size.max_q))
            num_tokens -= ends[-1]
        if num_tokens:
            raise InvalidArgument(
                f"step {step.index} of {own} cannot be padded to {size}: tokens that are added "
                f"need more sequences, which have {min(self._capacity, size.max_q)} tokens each "
                "at most"
            )
        return [(0, end) for end in ends]

    def _write(self, name: str, values: list[Any]) -> None:
        """Writes a whole array."""
        getattr(self, name)[:] = values

    def _write_parameters(self, owners: list[Request], offsets: list[int], num_added: int) -> None:
        """Writes what rows need to choose a token; added rows are greedy."""
        padding = {"top_p": 1.0, "repetition_penalty": 1.0}
        for name in PARAMETERS:
            values = [getattr(request.parameters, name) for request in owners]
            self._write(name, values + [padding.get(name, 0)] * num_added)
        self._write("seed", [request.seed for request in owners] + [0] * num_added)
        self._write("offset", offsets + [0] * num_added)
