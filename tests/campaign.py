"""Long tests: every trial runs in ``make campaign``, a tenth of them in ``make test``."""

from __future__ import annotations

import os

import pytest

RUNS_ALL = os.environ.get("KERNELCAT_CAMPAIGN", "") not in ("", "0")


def share(count: int) -> int:
    """The number of trials to run out of ``count``."""
    return count if RUNS_ALL else max(1, count // 10)


def seeds(count: int) -> pytest.MarkDecorator:
    """Runs a test, once for each value of its argument ``seed``: ``share(count)`` times."""
    marks = pytest.mark.campaign
    return pytest.mark.parametrize(
        "seed", [pytest.param(i, marks=marks) for i in range(share(count))]
    )
