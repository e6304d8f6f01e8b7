"""Long tests: every trial runs in ``make campaign``, a part of them in ``make test``.

Of random trials that part is a twentieth; of a sweep it is a case of each kind.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

RUNS_ALL = os.environ.get("KERNELCAT_CAMPAIGN", "") not in ("", "0")


def share(count: int) -> int:
    """The number of trials to run out of ``count``."""
    return count if RUNS_ALL else max(1, count // 20)


def seeds(count: int) -> pytest.MarkDecorator:
    """Runs a test, once for each value of its argument ``seed``: ``share(count)`` times."""
    marks = pytest.mark.campaign
    return pytest.mark.parametrize(
        "seed", [pytest.param(i, marks=marks) for i in range(share(count))]
    )


def only_in_campaigns(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test for ``cases`` of a sweep; none outside of a campaign."""
    return [pytest.param(*case, marks=pytest.mark.campaign) for case in cases if RUNS_ALL]
