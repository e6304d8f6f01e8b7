"""Races and timers, on clocks that the tests advance."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcat import catalog
from kernelcat.bench import peers
from kernelcat.bench.race import Contestant, copies_needed, race
from kernelcat.bench.states import REST_S, STATES, TUNED
from kernelcat.bench.timer import Graph, HostTimer, num_repeats
from kernelcat.runtime import telemetry
from kernelcat.store import STATES as STORED_STATES
from kernelcat.tune.backend import Cuda


class Host:
    """A clock that advances only when a race sleeps or works."""

    def __init__(self) -> None:
        self.now, self.sleeps = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps.append(seconds)


class Tick:
    """A stand-in for a kernel that takes ``us`` microseconds; logs its runs and their targets."""

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

    def one_pass(self) -> float:
        return self.estimate_us

    first_run = one_pass


class Chip:
    """A stand-in for a sampler: a chip with a constant SM clock (MHz)."""

    def __init__(self, clock: int) -> None:
        self.clock = clock

    def read(self) -> telemetry.Reading:
        return telemetry.Reading(self.clock, 1980, 650.0, 60, ("power_cap",))


def _race(seed=0, state="burst", clock=1980, host=None) -> tuple[list[str], dict[str, Contestant]]:
    """Races three stand-ins in 12 blocks; returns their names in running order, and the race."""
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


def test_readings_of_the_chip_are_summarized() -> None:
    _, contestants = _race(clock=1500)
    summary = telemetry.summary(contestants["a"].readings)
    assert summary["sm_clock_mhz"] == 1500 and summary["throttle"] == ["power_cap"]
    assert telemetry.summary([]) == {}


def test_a_burst_race_rests_before_every_block_and_longer_while_the_clock_is_low() -> None:
    shortest, longest = REST_S
    cool, hot = Host(), Host()
    _race(host=cool)
    assert len(cool.sleeps) == 36 and cool.sleeps[0] == longest
    assert cool.sleeps[1:] == pytest.approx([5 * 0.002] * 35)
    _race(clock=1500, host=hot)
    assert set(hot.sleeps) == {longest}
    assert STATES["burst"].rest_s(1.0, clock=1.0) == shortest
    assert STATES["burst"].rest_s(1e6, clock=1.0) == longest


def test_a_sustained_race_warms_up_and_never_rests() -> None:
    host = Host()
    _, contestants = _race(state="sustained", host=host)
    assert set(host.sleeps) == {0.0}
    for contestant in contestants.values():
        num_warm_ups = len(contestant.timed.targets) - 12
        assert 3 * num_warm_ups * 0.006 == pytest.approx(STATES["sustained"].warm_up_s, abs=0.02)
        assert len(contestant.samples) == len(contestant.readings) == 12


def test_the_store_has_the_same_states() -> None:
    assert set(STATES) == set(STORED_STATES) and set(TUNED) < set(STORED_STATES)


def test_lines_of_nvidia_smi_are_parsed() -> None:
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
def test_copies_make_l2_cold_within_free_memory(moved, multiple, l2, free) -> None:
    each = moved * multiple
    copies = copies_needed(moved, each, l2, free)
    assert 1 <= copies <= 2048
    assert copies == 1 or (copies - 1) * moved < 3 * l2
    assert copies == 1 or copies * each <= 0.4 * free


def test_a_problem_that_fits_into_l2_many_times_has_few_copies() -> None:
    l2, free = 50 << 20, 100 << 30
    assert copies_needed(3 << 10, 3 << 10, l2, free) == 64
    assert copies_needed(30 << 10, 30 << 10, l2, free) == 2048


def test_the_host_timer_measures() -> None:
    calls = []
    timed = HostTimer().prepare([lambda: calls.append(1), lambda: calls.append(2)], "eager")
    assert timed.block(100.0) > 0
    assert calls.count(1) == calls.count(2) > 1
    assert num_repeats(100, 30) == 4 and num_repeats(1, 30) == 1


class FakeCuda:
    """A stand-in for CuPy and a stream, on a clock that advances only by launches."""

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
def test_a_graph_uses_all_copies_equally_and_hides_gaps_of_replays(us, copies, nodes) -> None:
    cuda = FakeCuda()
    timed = Graph([lambda: cuda.launch_kernel(us)] * copies, cuda, cuda)
    assert cuda.graphs[-1] % copies == 0
    assert abs(cuda.graphs[-1] - nodes) <= nodes // 2
    before_us, calls = cuda.now_us, []
    assert timed.block(6000.0, during=lambda: calls.append(1)) == pytest.approx(us, rel=0.02)
    assert calls and cuda.now_us - before_us > 5000


def test_a_graph_keeps_the_arrays_of_its_runs_and_the_memory_of_its_capture() -> None:
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
    timed.one_pass()
    del timed
    gc.collect()
    assert held() is None


def test_a_capture_that_fails_is_ended() -> None:
    cuda = FakeCuda()

    def refuse() -> None:
        if cuda.capturing is not None:
            raise RuntimeError("not in a capture")

    with pytest.raises(RuntimeError, match="not in a capture"):
        Graph([refuse], cuda, cuda)
    assert cuda.capturing is None


def test_a_compiled_peer_serves_more_shapes_than_torch_compiles_for_one_function(
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
