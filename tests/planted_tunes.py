"""Tunes of the planted entry: its backend, a store, and short ways to run and read a tune."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from kernelcat.store import Store
from kernelcat.tune import Limits, Quiet, tune

PLANTED = Path(__file__).parent / "planted"
QUICK = Limits(candidate_s=1.0, compile_s=1.5, peer_s=5)
"""For tunes in which something hangs."""
PATIENT = Limits(candidate_s=60, compile_s=60, peer_s=60)
"""For tunes in which nothing hangs: on a busy machine every process may have to wait."""


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Makes the planted backend importable here and in the processes of a tune; its module."""
    paths = [str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("PLANTED_LOG", str(tmp_path / "loads"))
    monkeypatch.syspath_prepend(str(PLANTED))
    import planted

    return planted


@pytest.fixture
def store():
    with Store.open() as opened:
        yield opened


def loads(tmp_path: Path) -> list[str]:
    """Kinds that workers loaded, in order."""
    return [kind for kind, _, _ in load_log(tmp_path)]


def load_log(tmp_path: Path) -> list[tuple[str, int, int]]:
    """Kind, size of the problem and device of each load, in order."""
    log = tmp_path / "loads"
    return (
        [tuple(json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []
    )


def run(store, **options):
    """Tunes the planted problem ``small`` in a burst, unless ``options`` say otherwise."""
    can_hang = options.get("variants") != ["honest"] or "PLANTED_HANG" in os.environ
    limits = QUICK if can_hang else PATIENT
    options = {"problems": ["small"], "limits": limits, "processes": 1, "progress": Quiet(),
               "states": ["burst"], **options}  # fmt: skip
    return tune("planted", backend="planted:Backend", store=store, **options)


def winner_of(report, state="burst"):
    """The winner for the first problem of a report."""
    return report.problems[0].winners["eager", state]


def kinds(rows, status=None) -> Counter[str]:
    """Kind (of a peer: its name) -> number of rows with ``status``."""
    selected = (row for row in rows if status is None or row.status == status)
    return Counter(row.config.get("kind", row.variant) for row in selected)
