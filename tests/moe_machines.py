"""What random histories of engines share: sizes, requests, and pages of layer groups."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fake_model import VOCAB
from hypothesis import strategies as st

from kernelcat.moe.engine.blocks import LayerGroup
from kernelcat.moe.engine.limits import Limits

SEEDS = 1000 if os.environ.get("KERNELCAT_CAMPAIGN") else 60
"""Random histories."""

SIZES = {
    "windows": st.sampled_from([(0,), (0, 5), (3, 0), (6,), (0, 2, 9)]),
    "page_size": st.sampled_from([1, 2, 4]),
    "num_pages": st.integers(6, 20),
    "step_tokens": st.integers(2, 12),
    "max_running": st.integers(1, 6),
    "num_drafts": st.integers(0, 3),
    "has_prefix_cache": st.booleans(),
}
REQUESTS = {
    "prefix": st.sampled_from([[], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 5, 6, 5, 6], [0] * 8]),
    "rest": st.lists(st.integers(0, VOCAB - 1), max_size=12),
    "max_tokens": st.none() | st.integers(1, 12),
    "temperature": st.sampled_from([0.0, 0.7]),
    "stop": st.sets(st.integers(0, VOCAB - 1), max_size=1),
    "salt": st.sampled_from(["", "", "b"]),
}


def layer_groups(
    windows: Sequence[int], page_size: int, num_pages: int, limits: Limits
) -> list[LayerGroup]:
    """A group for each window; those with one have at least the pages that the engine accepts."""
    groups = []
    for i, window in enumerate(windows):
        least = -(-(window + limits.span) // page_size) + 3
        pages = min(num_pages, least) if window else num_pages
        groups.append(LayerGroup(str(i), max(pages, least if window else 0), window))
    return groups
