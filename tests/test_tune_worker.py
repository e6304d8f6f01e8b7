"""A measuring worker without its process, on the planted backend."""

from __future__ import annotations

import dataclasses

import planted_tunes
import pytest

from kernelcat.bench.timer import HostTimer
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Peer
from kernelcat.store.measurement import PEER
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.messages import Place, Race, Raced, Timing
from kernelcat.tune.worker import Worker

planted = planted_tunes.planted

OURS = Candidate("cuda", "honest", Config(kind="fast"))
THEIRS = Candidate(PEER, "gathers", Config())


class TwoRegimes(HostTimer):
    """Like a GPU's timer: what is raced in the second regime is judged in the first."""

    regimes = ("graph", "eager")


def gathers(problem, arrays):
    """A peer that reads its inputs when it is bound, as attention over gathered keys does."""
    src = arrays["src"].copy()

    def run() -> None:
        arrays["dst"][...] = src

    return run


@pytest.mark.parametrize("regime", TwoRegimes.regimes)
@pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)])
def test_a_peer_that_reads_its_inputs_when_it_is_bound_is_judged_on_them(
    planted, monkeypatch, regime: str, order: tuple[Candidate, ...]
) -> None:
    """Before it is judged, other contestants were judged on inputs of their own."""
    entry = dataclasses.replace(planted.ENTRY, peers=(Peer("gathers", lambda: gathers),))
    monkeypatch.setattr(planted, "ENTRY", entry)
    monkeypatch.setattr(planted.Backend, "timer", lambda self, device: TwoRegimes(planted.CLOCK))
    worker = Worker("planted:Backend", 0, lambda candidate: None)
    worker.answer(Place(entry.problems["small"], 0))
    raced = worker.answer(Race(order, regime, "burst", 0, 1, (2, 3, 4)))
    assert isinstance(raced, Raced), raced
    assert all(isinstance(each, Timing) for each in raced.outcomes.values()), raced
