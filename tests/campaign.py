"""Long campaigns: ``make campaign`` runs all of one, every other run a tenth of it."""

from __future__ import annotations

import os

import pytest

WHOLE = os.environ.get("KERNELCAT_CAMPAIGN", "") not in ("", "0")


def share(count: int) -> int:
    """How many of ``count`` trials to run."""
    return count if WHOLE else max(1, count // 10)


def seeds(count: int) -> pytest.MarkDecorator:
    """Run a test that takes ``seed`` with the first of ``count`` seeds, or with all of them."""
    return pytest.mark.parametrize("seed", range(share(count)))
