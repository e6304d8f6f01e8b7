"""What `moe_dispatch` and `moe_combine` share: rows of tokens travel in slots or in rings of tiles.

The template argument kTileTokens is the number of tokens of a tile, or 0 for slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.windows import HALF_BYTES, TRIP_US, wire_us
from kernelcat.reference._exchange import mean_rows
from kernelcat.runtime.gpu import Gpu

THREADS = 256
"""Threads of a thread block."""
LL_SPACE = {"blocks": (64, 128, 192, 256)}
TILE_SPACE = {"tile_tokens": (1, 2, 4), "blocks": (32, 64, 128, 192, 224, 256)}
"""tile_tokens : tokens of a tile; blocks : thread blocks for rows, at most"""
LOOKAHEAD = 1
"""Tiles that travel while a thread block works (``kernelcat/row_ring_tiles.cuh``)."""
RING_TILES = 2 + 2 * LOOKAHEAD
"""Tiles of a ring."""
TILE_US, TILE_RATE = 2.0, 8e9
"""A thread block's loads, signal and wait for a tile, and bytes per second of what it moves."""
ROW_US = 0.5
"""From the load of a row to its store into a slot, for rows that a thread block sends in turn."""
OVERLAP = 0.1
"""Share of the shorter times that the longest does not hide."""


def tile_tokens(config: Config) -> int:
    """Tokens of a tile, or 0 for slots."""
    return int(config.get("tile_tokens", 0))


def row_blocks(problem: Problem, config: Config) -> int:
    """Thread blocks that move rows."""
    tiles = ceil(problem["tokens"] / max(tile_tokens(config), 1))
    return int(min(max(tiles, 1), config["blocks"]))


def tokens_of_block(problem: Problem, config: Config) -> int:
    """Tokens whose rows a thread block moves, at most; in whole tiles."""
    tokens = max(tile_tokens(config), 1)
    return int(tokens * ceil(problem["tokens"] / (tokens * row_blocks(problem, config))))


def _ring_bytes(config: Config, row_bytes: int) -> int:
    return RING_TILES * tile_tokens(config) * row_bytes


@dataclass(frozen=True)
class Exchange:
    """One of the two entries.

    Attributes
    ----------
    entry : its name
    program : the launch of a configuration
    wire_bytes : bytes of a row on the wire
    illegal : why another part of a launch cannot be, or None
    trips : trips to a peer and back, one after the other, of slots; rings take one more
    beside_us : microseconds of the work beside the rows
    """

    entry: str
    program: Callable[[Problem, Config, Gpu], Program]
    wire_bytes: Callable[[Problem], int]
    illegal: Callable[[Config, Problem, Gpu], str | None]
    trips: int
    beside_us: Callable[[Problem, Config, Gpu], float]

    def why_no_room(self, config: Config, problem: Problem, gpu: Gpu) -> str | None:
        """Why the windows or the GPU have no room for a launch, or None."""
        row_bytes, ranks = self.wire_bytes(problem), problem["ranks"]
        if not tile_tokens(config):
            slots = ranks * problem["tokens"] * row_bytes
            if slots > HALF_BYTES:
                return f"slots of {slots} bytes do not fit into a window"
        elif config["blocks"] * (ranks - 1) * _ring_bytes(config, row_bytes) > HALF_BYTES:
            return "rings of tiles do not fit into a window: fewer blocks or smaller tiles"
        return self.illegal(config, problem, gpu)

    def estimate(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """The longest of wire, local memory, thread blocks and the work beside them; and trips."""
        tokens, row_bytes = tile_tokens(config), self.wire_bytes(problem)
        received = mean_rows(problem) * row_bytes
        sent = received * (problem["ranks"] - 1) / problem["ranks"]
        rounds = tokens_of_block(problem, config) / max(tokens, 1)
        round_us = TILE_US + tokens * row_bytes / TILE_RATE * 1e6 if tokens else ROW_US
        times = sorted((
            wire_us(sent, row_blocks(problem, config)), copy_us(int(4 * received), gpu),
            rounds * round_us, self.beside_us(problem, config, gpu),
        ))  # fmt: skip
        trips = self.trips + (tokens > 0)
        return LAUNCH_US + times[-1] + OVERLAP * sum(times[:-1]) + trips * TRIP_US

    def implementations(
        self, techniques: Mapping[str, str]
    ) -> tuple[Implementation, Implementation]:
        """`tiles` and `ll`; ``techniques`` are those of `tiles` beside signals."""
        tiles = Implementation(
            entry=self.entry,
            language="cuda",
            variant="tiles",
            summary="rows travel in rings of tiles, with a signal for each tile",
            archs=("sm_80+",),
            space=TILE_SPACE,
            illegal=self.why_no_room,
            program=self.program,
            estimate=self.estimate,
            techniques={
                "system-scope release": "STG.E.64.STRONG.SYS",
                "system-scope acquire": "LDG.E.64.STRONG.SYS",
                **techniques,
            },
            rank=0,
        )
        ll = replace(
            tiles,
            variant="ll",
            summary="low latency: a slot for each token, whose words are their own flags",
            space=LL_SPACE,
            techniques={"words that arrive": "STG*128.STRONG.SYS"},
            rank=1,
        )
        return tiles, ll
