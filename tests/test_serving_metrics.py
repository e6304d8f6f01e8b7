"""TTFT, TPOT, ITL, throughput and goodput against numbers worked out by hand."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from kernelcat.errors import InvalidArgument
from kernelcat.moe.serving_metrics import Percentiles, Slo, Timeline, measure
from kernelcat.moe.workload import Workload

SLOW = Timeline(0.0, [1.0, 1.1, 1.3], num_tokens=5, num_prompt_tokens=7)
"""Five tokens in three pieces: TPOT (1.3 - 1.0) / 4."""
QUICK = Timeline(1.0, [1.5, 2.0], num_tokens=2, num_prompt_tokens=3)
SHORT = Timeline(2.0, [2.25], num_tokens=1, num_prompt_tokens=1)
FAILED = Timeline(0.5, [0.6], num_tokens=1, num_prompt_tokens=9, error="429")
SILENT = Timeline(0.5)


def test_metrics_are_as_defined():
    found = measure([SLOW, QUICK, SHORT, FAILED, SILENT])
    assert (found.num_requests, found.num_complete, found.duration_s) == (5, 3, 2.25)
    assert (found.num_prompt_tokens, found.num_output_tokens) == (11, 8)
    assert found.output_throughput == pytest.approx(8 / 2.25)
    assert found.request_throughput == found.goodput == pytest.approx(3 / 2.25)
    assert found.errors == {"429": 1, "no output": 1}
    assert (found.ttft_ms.count, found.ttft_ms.max) == (3, pytest.approx(1000))
    assert found.ttft_ms.mean == pytest.approx(1750 / 3)
    assert (found.tpot_ms.count, found.tpot_ms.p50) == (2, pytest.approx((75 + 500) / 2))
    assert found.itl_ms.count == 3  # pooled: two gaps of one request, one of another
    assert found.itl_ms.p50 == pytest.approx(200)
    assert found.latency_ms.max == pytest.approx(1300)


def test_percentiles_interpolate():
    found = Percentiles.of([i / 1000 for i in range(101)])
    assert [found.p50, found.p90, found.p95, found.p99, found.max] == pytest.approx(
        [50, 90, 95, 99, 100]
    )
    assert Percentiles.of([]) is None


@pytest.mark.parametrize(
    ("text", "num_good"),
    [("", 3), ("ttft=600", 2), ("tpot=100", 2), ("latency=1100", 2), ("ttft=600,tpot=100", 1)],
)
def test_goodput_counts_requests_that_meet_every_objective(text, num_good):
    found = measure([SLOW, QUICK, SHORT, FAILED], Slo.parse(text))
    assert found.goodput * found.duration_s == pytest.approx(num_good)


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=-1", "itl=3", "ttft=1,ttft=2", "tpot=nan"])
def test_objectives_that_make_no_sense_are_refused(text):
    with pytest.raises(InvalidArgument, match="no objective"):
        Slo.parse(text)


def test_a_load_without_output_has_no_rates():
    found = measure([SILENT])
    assert (found.num_complete, found.goodput, found.ttft_ms) == (0, 0.0, None)
    with pytest.raises(InvalidArgument, match="no request"):
        measure([])


def test_workloads_repeat_and_are_poisson():
    load = Workload(2000, (10, 20), (1, 3), rate=50)
    arrivals = load.arrivals(17)
    assert arrivals == load.arrivals(17) != Workload(2000, (10, 20), (1, 3), 50, 1).arrivals(17)
    assert {len(a.prompt) for a in arrivals} == set(range(10, 21))
    assert {a.num_output for a in arrivals} == {1, 2, 3}
    assert {t for a in arrivals for t in a.prompt} == set(range(17))
    times = [a.time for a in arrivals]
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert times[0] == 0 and mean == pytest.approx(1 / 50, rel=0.1)
    assert variance**0.5 == pytest.approx(mean, rel=0.1)  # of an exponential distribution
    assert {a.time for a in Workload(3).arrivals(5)} == {0.0} and Workload().rate == inf


def test_workloads_that_make_no_sense_are_refused():
    for fields in ({"num_requests": 0}, {"rate": 0.0}, {"input_range": (5, 4)}):
        with pytest.raises(InvalidArgument, match=next(iter(fields))):
            Workload(**fields)
