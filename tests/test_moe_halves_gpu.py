"""Exchanges of several GPUs beside products: what overlaps, on a timeline and in time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernelcat.moe.parallel.halves import EXPERT_RANKS
from kernelcat.runtime import driver

RANK = Path(__file__).parent / "ranks_overlap.py"
HALVED = ("experts", "projection 2880", "projection 7168")
"""Layers whose steps are computed in halves."""
LAYERS = (*HALVED, "shared expert")
BESIDE = ("experts", "projection 7168", "shared expert")
"""Layers whose exchange runs while a product does. That of 2880 columns shares no SMs out."""
MOST_ERROR = 0.01
"""Largest norm of the difference between a layer with overlap and one without, as a part of the
result's norm: halves may have other tiles, which round in another order."""

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 prints; ranks are the GPUs of this machine, 2, 4 or 8."""
    if driver.count() < 2:
        pytest.skip("needs two GPUs")
    ranks = 1 << min(driver.count(), 8).bit_length() - 1
    folder = tmp_path_factory.mktemp("ranks")
    processes = [
        subprocess.Popen(
            [sys.executable, RANK, *map(str, (rank, ranks, folder))],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found: dict[str, Any] = json.loads(texts[0].splitlines()[-1])
    return {**found, "ranks": ranks}


def timelines(result: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The kernels of a layer's way without overlap, and of the one with most of it."""
    return list(result["timelines"].values())


def overlaps(kernels: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """Kernels of different streams that ran at one time, and for how many microseconds."""
    found = []
    for i, a in enumerate(kernels):
        for b in kernels[i + 1 :]:
            us = min(a["end"], b["end"]) - max(a["start"], b["start"])
            if a["stream"] != b["stream"] and us > 0:
                found.append((a["name"], b["name"], us))
    return found


def test_times_and_timelines(measured: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what was measured, for docs/measured.md."""
    with capsys.disabled():
        print(f"\n{measured['ranks']} x {measured['gpu']}, 8,192 or 128 tokens a rank")
        for name, result in measured["layers"].items():
            whole = next(iter(result["times"].values()))
            print(f"\n{name}")
            for way, ms in result["times"].items():
                error = result["errors"][way]
                print(f"  {way:24} {1e3 * ms:8.1f} us  {whole / ms:.3f} x  error {error:.1e}")
            for way, kernels in result["timelines"].items():
                print(f"  timeline, {way} (stream, start and end in us)")
                for kernel in kernels:
                    start, end, text = kernel["start"], kernel["end"], kernel["name"][:70]
                    print(f"    {kernel['stream']:4} {start:9.1f} {end:9.1f}  {text}")
            print(f"  overlap {sum(us for _, _, us in overlaps(timelines(result)[1])):.1f} us")
    assert set(measured["layers"]) == set(LAYERS)


@pytest.mark.parametrize("name", BESIDE)
def test_an_exchange_runs_beside_a_product(name: str, measured: dict[str, Any]) -> None:
    without, with_overlap = timelines(measured["layers"][name])
    assert sum(us for _, _, us in overlaps(with_overlap)) > (3 if name == "shared expert" else 10)
    assert not overlaps(without)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_overlap_are_right(name: str, measured: dict[str, Any]) -> None:
    result = measured["layers"][name]
    assert max(result["errors"].values()) < MOST_ERROR
    assert result["is_replayed"]


@pytest.mark.parametrize("name", HALVED)
def test_halves_that_overlap_take_less_time_than_in_sequence(
    name: str, measured: dict[str, Any]
) -> None:
    skip_where_halves_are_no_default(name, measured["ranks"])
    times = measured["layers"][name]["times"]
    assert times["halves"] < times["halves in sequence"]


@pytest.mark.parametrize("name", HALVED)
def test_halves_take_less_time_than_the_whole(name: str, measured: dict[str, Any]) -> None:
    skip_where_halves_are_no_default(name, measured["ranks"])
    times = measured["layers"][name]["times"]
    assert times["halves"] < times["whole"]


def skip_where_halves_are_no_default(name: str, ranks: int) -> None:
    """Skips experts on two ranks, whose halves tie with and without overlap (measured)."""
    if name == "experts" and ranks < EXPERT_RANKS:
        pytest.skip(f"halves are the default from {EXPERT_RANKS} ranks on")


def test_a_shared_expert_beside_the_exchange_takes_less_time(measured: dict[str, Any]) -> None:
    times = measured["layers"]["shared expert"]["times"]
    assert times["beside the exchange"] < times["in sequence"]
