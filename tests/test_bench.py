"""The measurement protocol: its statistics as properties, its races on fake clocks."""

from __future__ import annotations

import gc
import math
import random
import weakref
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcat import catalog
from kernelcat.bench import peers
from kernelcat.bench.race import Contestant, copies_needed, race
from kernelcat.bench.states import BLOCKS, REST_S, STATES, TUNED
from kernelcat.bench.stats import (
    MARGIN,
    Interval,
    corrected,
    decide,
    leader,
    median_interval,
    ratio_interval,
    ties,
)
from kernelcat.bench.timer import Graph, HostTimer, rounds
from kernelcat.runtime import telemetry
from kernelcat.store import STATES as RACED
from kernelcat.tune.backend import Cuda

times = st.floats(0.5, 1e6)
samples = st.lists(times, min_size=1, max_size=60)


@given(samples, st.floats(0.5, 0.999))
def test_an_interval_holds_its_median_and_lies_within_the_samples(values, confidence) -> None:
    found = median_interval(values, confidence)
    assert found.median == median(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


@given(samples, st.floats(0.5, 0.99), st.floats(0.0, 0.009))
def test_more_confidence_never_narrows_an_interval(values, confidence, more) -> None:
    narrow, wide = median_interval(values, confidence), median_interval(values, confidence + more)
    assert wide.low <= narrow.low and narrow.high <= wide.high


@given(samples, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(values, shuffle) -> None:
    shuffled = list(values)
    shuffle.shuffle(shuffled)
    assert median_interval(values) == median_interval(shuffled)


def test_the_interval_covers_as_often_as_it_says() -> None:
    draw = random.Random(7)
    for n in (6, 9, 15, 30):
        held = sum(
            (found := median_interval([draw.gauss(0, 1) for _ in range(n)])).low <= 0 <= found.high
            for _ in range(2000)
        )
        assert held / 2000 > 0.94, n


def test_the_interval_of_fifteen_blocks_is_the_sign_tests() -> None:
    assert median_interval(list(range(1, 16))) == Interval(8, 4, 12)


def test_a_race_has_blocks_enough_for_fifty_rivals() -> None:
    """The whole range of the blocks still covers with the corrected confidence."""
    assert corrected(50) <= 1 - 2 / 2**BLOCKS
    assert median_interval(list(range(BLOCKS))) == Interval(5, 1, 9)


def test_a_thousand_samples_are_not_too_many() -> None:
    found = median_interval(range(1, 2002))
    assert 950 < found.low < found.median == 1001 < found.high < 1050


def test_nothing_has_no_median() -> None:
    with pytest.raises(ValueError, match="nothing"):
        median_interval([])


@given(st.lists(st.tuples(times, times), min_size=1, max_size=40))
def test_a_ratio_and_its_inverse_agree(pairs) -> None:
    a, b = zip(*pairs, strict=True)
    there, back = ratio_interval(a, b), ratio_interval(b, a)
    assert math.isclose(there.median, 1 / back.median, rel_tol=1e-9)
    assert math.isclose(there.low, 1 / back.high, rel_tol=1e-9)


@given(st.lists(st.tuples(times, st.floats(0.1, 10)), min_size=6, max_size=40))
def test_drift_that_hits_both_contestants_alike_changes_no_ratio(pairs) -> None:
    base = [t for t, _ in pairs]
    drifted = [t * drift for t, drift in pairs]
    slower = [1.1 * t for t in drifted]
    found = ratio_interval(slower, drifted)
    assert math.isclose(found.low, 1.1, rel_tol=1e-9)
    assert ratio_interval(base, base) == Interval(1, 1, 1)


@given(st.integers(1, 50))
def test_correction_asks_for_more_the_more_is_compared(comparisons) -> None:
    assert corrected(comparisons) <= corrected(comparisons + 1) < 1
    assert corrected(1) == pytest.approx(0.95)


def _samples(rng: random.Random, mean: float, noise: float, drift: list[float]) -> list[float]:
    return [mean * d * (1 + rng.gauss(0, noise)) for d in drift]


def test_a_real_difference_wins_under_drift_that_is_far_larger() -> None:
    rng = random.Random(1)
    drift = [1 + 0.3 * i / 15 for i in range(15)]
    samples = {"b": _samples(rng, 103, 0.002, drift), "a": _samples(rng, 100, 0.002, drift)}
    assert leader(samples) == "a"
    assert decide(samples, order=str).winner == "a"


def test_noise_is_a_tie_and_the_simplest_wins() -> None:
    rng = random.Random(2)
    drift = [1.0] * 15
    for _ in range(20):
        samples = {k: _samples(rng, 100, 0.02, drift) for k in "cab"}
        decision = decide(samples, order=str)
        assert decision.winner == "a"


def test_a_tie_is_never_won_by_who_is_far_behind_in_the_median() -> None:
    wild = [100.0 + 60 * (i % 3) for i in range(11)]
    samples = {"simple": [1.06 * t for t in reversed(wild)], "tricky": wild}
    decision = decide(samples, ["simple", "tricky"].index)
    assert (decision.winner, decision.tied) == ("tricky", ("simple", "tricky"))


def test_less_than_one_percent_is_a_tie_however_sure() -> None:
    samples = {"simple": [100.9] * 15, "tricky": [100.0] * 15}
    order = ["simple", "tricky"].index
    assert decide(samples, order).winner == "simple"
    assert decide({**samples, "simple": [101.1] * 15}, order).winner == "tricky"


@pytest.mark.parametrize(("gain", "winner"), [(0.015, "old"), (0.025, "new")])
def test_a_challenger_must_beat_the_incumbent_by_two_percent(gain, winner) -> None:
    samples = {"old": [100.0 * (1 + gain)] * 15, "new": [100.0] * 15}
    assert decide(samples, str, incumbent="old").winner == winner
    assert (gain > MARGIN) == (winner == "new")


def test_an_incumbent_that_is_not_in_the_race_changes_nothing() -> None:
    samples = {"a": [100.0] * 15, "b": [150.0] * 15}
    assert decide(samples, str, incumbent="gone") == decide(samples, str)


@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(times, min_size=8, max_size=8),
                       min_size=1), st.sampled_from("abcdef"))  # fmt: skip
def test_a_winner_is_decided_and_racing_again_keeps_it(samples, incumbent) -> None:
    decision = decide(samples, str, incumbent)
    assert decision.winner in samples
    assert decide(dict(reversed(samples.items())), str, incumbent) == decision
    assert decide(samples, str, decision.winner).winner == decision.winner


def test_ties_looks_at_noise_and_at_size() -> None:
    assert ties(Interval(1.05, 0.99, 1.1))
    assert ties(Interval(1.009, 1.008, 1.010))
    assert not ties(Interval(1.05, 1.02, 1.08))


class Host:
    """A clock that only sleep and work move."""

    def __init__(self) -> None:
        self.now, self.sleeps = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps.append(seconds)


class Tick:
    """A timed thing with a known time, that notes when it ran and for how long it was asked to."""

    def __init__(self, name: str, us: float, log: list[str], host: Host) -> None:
        self.name, self.estimate_us, self.log, self.host = name, us, log, host
        self.targets: list[float] = []

    def block(self, target_us, during=None) -> float:
        self.host.now += max(target_us, self.estimate_us) * 1e-6
        self.targets.append(target_us)
        if during:
            self.log.append(self.name)
            during()
        return self.estimate_us

    def once(self) -> None:
        pass


class Chip:
    def __init__(self, clock: int) -> None:
        self.clock = clock

    def read(self) -> telemetry.Reading:
        return telemetry.Reading(self.clock, 1980, 650.0, 60, ("power_cap",))


def _race(seed=0, state="burst", clock=1980, host=None) -> tuple[list[str], dict[str, Contestant]]:
    log, host = list[str](), host or Host()
    times = {"a": 1.0, "b": 2.0, "c": 3.0}
    contestants = {name: Contestant(Tick(name, us, log, host)) for name, us in times.items()}
    race(contestants, Chip(clock), STATES[state], blocks=12, seed=seed, host=host)
    return log, contestants


def test_a_race_interleaves_randomized_blocks() -> None:
    log, contestants = _race(0)
    blocks = [tuple(log[i : i + 3]) for i in range(0, 36, 3)]
    assert all(sorted(block) == ["a", "b", "c"] for block in blocks)
    assert len(set(blocks)) > 2
    assert _race(0)[0] == log != _race(1)[0]
    assert [len(c.samples) for c in contestants.values()] == [12, 12, 12]
    assert all(len(c.readings) == 12 for c in contestants.values())


def test_what_the_chip_did_is_summed_up() -> None:
    _, contestants = _race(clock=1500)
    found = telemetry.summary(contestants["a"].readings)
    assert found["sm_clock_mhz"] == 1500 and found["throttle"] == ["power_cap"]
    assert telemetry.summary([]) == {}


def test_a_burst_idles_before_every_block_and_longer_while_the_clock_is_down() -> None:
    shortest, longest = REST_S
    cool, hot = Host(), Host()
    _race(host=cool)
    assert len(cool.sleeps) == 36 and cool.sleeps[0] == longest
    assert cool.sleeps[1:] == pytest.approx([5 * 0.002] * 35)
    _race(clock=1500, host=hot)
    assert set(hot.sleeps) == {longest}
    assert STATES["burst"].rest_s(1.0, clock=1.0) == shortest
    assert STATES["burst"].rest_s(1e6, clock=1.0) == longest


def test_a_sustained_race_warms_up_and_never_idles() -> None:
    host = Host()
    _, contestants = _race(state="sustained", host=host)
    assert set(host.sleeps) == {0.0}
    for lane in contestants.values():
        warmed = len(lane.timed.targets) - 12
        assert 3 * warmed * 0.006 == pytest.approx(STATES["sustained"].warm_up_s, abs=0.02)
        assert len(lane.samples) == len(lane.readings) == 12


def test_every_state_has_its_place_in_the_store() -> None:
    assert set(STATES) == set(RACED) and set(TUNED) < set(RACED)


def test_nvidia_smi_lines_are_understood() -> None:
    line = "1980, 1980, 231.52, 41, 0x0000000000000004\n"
    assert telemetry.parse_smi(line) == telemetry.Reading(1980, 1980, 231.52, 41, ("power_cap",))
    assert telemetry.parse_smi("[N/A], [N/A], 12.0, 41, 0x0") is None
    assert telemetry.throttles(0x1 | 0x2) == ()


@given(
    st.integers(1, 1 << 34),
    st.integers(1, 100),
    st.integers(1 << 20, 1 << 28),
    st.integers(0, 1 << 38),
)
def test_copies_make_l2_cold_within_the_memory_there_is(moved, share, l2, free) -> None:
    each = moved * share
    copies = copies_needed(moved, each, l2, free)
    assert 1 <= copies <= 2048
    assert copies == 1 or (copies - 1) * moved < 3 * l2
    assert copies == 1 or copies * each <= 0.4 * free


def test_the_host_timer_measures() -> None:
    calls = []
    timed = HostTimer().prepare([lambda: calls.append(1), lambda: calls.append(2)], "eager")
    assert timed.block(100.0) > 0
    assert calls.count(1) == calls.count(2) > 1
    assert rounds(100, 30) == 4 and rounds(1, 30) == 1


class FakeCuda:
    """A stream, its graphs and events, on a clock that only launches move."""

    def __init__(self) -> None:
        self.now_us, self.capturing = 0.0, None
        self.cuda = self
        self.graphs: list[int] = []

    def launch_kernel(self, us: float) -> None:
        if self.capturing is not None:
            self.capturing.append(us)
        else:
            self.now_us += us

    def begin_capture(self) -> None:
        self.capturing = []

    def end_capture(self) -> FakeGraph:
        captured, self.capturing = self.capturing, None
        self.graphs.append(len(captured))
        return FakeGraph(self, captured)

    def synchronize(self) -> None:
        pass

    def Event(self) -> FakeEvent:
        return FakeEvent()

    def get_elapsed_time(self, start: FakeEvent, end: FakeEvent) -> float:
        return (end.at - start.at) / 1000


class FakeGraph:
    def __init__(self, cuda: FakeCuda, kernels: list[float]) -> None:
        self.cuda, self.kernels, self.uploads = cuda, kernels, 0

    def upload(self, stream: FakeCuda) -> None:
        self.uploads += 1

    def launch(self, stream: FakeCuda) -> None:
        assert self.uploads
        self.cuda.now_us += sum(self.kernels) + 3  # the gap between two graphs


class FakeEvent:
    at = 0.0

    def record(self, stream: FakeCuda) -> None:
        self.at = stream.now_us

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize(("us", "copies", "nodes"), [(10.0, 3, 93), (5000.0, 1, 1), (0.5, 9, 1503)])
def test_a_graph_holds_whole_turns_of_the_copies_and_hides_its_gaps(us, copies, nodes) -> None:
    cuda = FakeCuda()
    timed = Graph([lambda: cuda.launch_kernel(us)] * copies, cuda, cuda)
    assert cuda.graphs[-1] % copies == 0
    assert abs(cuda.graphs[-1] - nodes) <= nodes // 2
    before, seen = cuda.now_us, []
    assert timed.block(6000.0, during=lambda: seen.append(1)) == pytest.approx(us, rel=0.02)
    assert seen and cuda.now_us - before > 5000


def test_a_graph_keeps_what_its_runs_hold_and_the_memory_they_were_captured_in() -> None:
    cuda, inside = FakeCuda(), []

    class Array:
        pass

    class Pool(Array):
        def __enter__(self) -> Pool:
            inside.append("in")
            return self

        def __exit__(self, *error: object) -> None:
            inside.append("out")

    def make():
        array = Array()

        def run(array: Array = array) -> None:
            assert inside == ["in"]
            cuda.launch_kernel(5.0)

        return run, weakref.ref(array)

    run, held = make()
    timed = Graph([run], cuda, cuda, Pool)
    del run
    gc.collect()
    assert held() is not None and isinstance(timed.memory, Pool) and inside == ["in", "out"]
    timed.once()
    del timed
    gc.collect()
    assert held() is None


def test_a_failed_capture_is_ended() -> None:
    cuda = FakeCuda()

    def refuse() -> None:
        if cuda.capturing is not None:
            raise RuntimeError("not in a capture")

    with pytest.raises(RuntimeError, match="not in a capture"):
        Graph([refuse], cuda, cuda)
    assert cuda.capturing is None


def test_a_compiled_peer_serves_more_problems_than_torch_compiles_a_function_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(peers, "tensors", lambda entry, problem, arrays: arrays)
    run = torch.compile(lambda x: x + 1, fullgraph=True, dynamic=False, backend="eager")

    def make(problem: Any, arrays: Any) -> Any:
        return lambda: run(arrays["x"])

    entry = catalog.entry("nvfp4_quantize")
    problem = next(iter(entry.problems.values()))
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    device = SimpleNamespace(xp=SimpleNamespace(get_default_memory_pool=lambda: pool))
    for size in range(1, 12):
        Cuda().release(device)  # as before every problem
        bound = peers.binder(entry, problem, make)({"x": torch.zeros(size)})
        assert bound().tolist() == [1.0] * size
