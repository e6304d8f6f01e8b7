"""Tunes on a GPU, with CUDA kernels that hang, write out of bounds, are wrong or do not compile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernelcat.bench import peers
from kernelcat.bench.states import TUNED
from kernelcat.bench.timer import CudaTimer
from kernelcat.catalog.implementation import Config
from kernelcat.runtime import driver, gpu
from kernelcat.runtime.device import CudaDevice
from kernelcat.store import SCREEN, Store
from kernelcat.tune import Limits, Quiet, tune

PLANTED = Path(__file__).parent / "planted"


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch):
    paths = [str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.syspath_prepend(str(PLANTED))
    import planted_cuda

    return planted_cuda


def test_planted_kernels_compile_or_fail_as_planned(planted) -> None:
    target, problem = gpu.find("h200"), planted.Backend().entry("tma_copy").named("1MB")
    for kind, status in planted.STATUS.items():
        build = planted.Backend().build
        if status == "compile_error":
            with pytest.raises(Exception, match="does not compile"):
                build(planted.PLANTED, problem, Config(kind=kind), target)
        else:
            [step] = build(planted.PLANTED, problem, Config(kind=kind), target)
            assert step["registers"] > 0


@pytest.mark.gpu
def test_each_planted_failure_costs_one_configuration_only(planted) -> None:
    pytest.importorskip("cupy")
    with Store.open() as store:
        options = {"backend": "planted_cuda:Backend", "store": store, "problems": ["1MB"],
                   "limits": Limits(candidate_s=8), "progress": Quiet()}  # fmt: skip
        report = tune("tma_copy", **options)
        screened = {row.config["kind"]: row for row in report.rows
                    if row.protocol["state"] == SCREEN and row.language != "peer"}  # fmt: skip
        assert {kind: row.status for kind, row in screened.items()} == planted.STATUS
        assert "wrote outside of dst" in screened["kOverruns"].detail
        winners = report.problems[0].winners
        assert {w.candidate.config["kind"] for w in winners.values()} == {"kGood"}
        races = {(regime, state) for regime in ("graph", "eager") for state in TUNED}
        assert set(winners) == races
        again = tune("tma_copy", **options)
    race = ("graph", "sustained")
    assert not again.problems[0].tried and again.restarts == 0
    assert again.problems[0].winners[race].candidate == winners[race].candidate


@pytest.mark.gpu
def test_a_race_on_a_gpu_records_the_chip_and_the_peer(planted) -> None:
    pytest.importorskip("cupy")
    torch = pytest.importorskip("torch")
    assert torch.cuda.is_available()
    with Store.open() as store:
        report = tune("tma_copy", backend="planted_cuda:Backend", store=store, problems=["64MB"],
                      budget_s=1e-6, limits=Limits(candidate_s=8), progress=Quiet())  # fmt: skip
    raced = [row for row in report.rows if row.protocol["state"] != SCREEN]
    assert {(row.language, row.variant) for row in raced} >= {("peer", "torch")}
    assert all(row.sm_clock_mhz and row.power_w and row.temperature_c for row in raced)
    assert all(row.protocol["l2"] == "cold" for row in raced)
    assert {row.state for row in raced} == set(TUNED)
    graph = {row.variant: row for row in raced if (row.regime, row.state) == ("graph", "burst")}
    assert 25 < graph["torch"].median_us < 100, "64 MB in and out at 2 to 4.8 TB/s"


@pytest.mark.gpu
def test_memory_of_a_peer_stays_reserved_while_its_graph_lives(request) -> None:
    cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")
    timer = CudaTimer(CudaDevice(0))
    peers.enter(timer)
    request.addfinalizer(cupy.cuda.Stream.null.use)
    request.addfinalizer(lambda: torch.cuda.set_stream(torch.cuda.default_stream()))
    size = {"size": (1 << 20,), "device": "cuda"}
    out = torch.empty(**size)

    def make():
        held = torch.full(fill_value=3.0, **size)
        return lambda: torch.add(held * 2.0, 1.0, out=out)  # the product is freed at once

    timed = timer.prepare([make()], "graph")
    others = [torch.zeros(**size) for _ in range(64)]
    out.zero_()
    timed.one_pass()
    torch.cuda.synchronize()
    assert (out == 7.0).all()
    assert not any(other.any() for other in others)


@pytest.mark.gpu
@pytest.mark.skipif(driver.count() < 2, reason="needs two GPUs")
def test_two_gpus_race_one_problem_each_with_its_peer(planted) -> None:
    pytest.importorskip("cupy")
    pytest.importorskip("torch")
    with Store.open() as store:
        report = tune("tma_copy", backend="planted_cuda:Backend", store=store, devices=(0, 1),
                      problems=["16MB", "64MB"], budget_s=1e-6, regimes=["graph"],
                      states=["burst"], limits=Limits(candidate_s=8), progress=Quiet())  # fmt: skip
    assert [problem.name for problem in report.problems] == ["16MB", "64MB"]
    raced = [row for row in report.rows if row.state == "burst"]
    peers = {row.problem_name for row in raced if (row.language, row.variant) == ("peer", "torch")}
    assert peers == {"16MB", "64MB"}
    assert all(row.sm_clock_mhz and row.power_w for row in raced)
    assert {row.run for row in report.rows} == {report.run}


def test_cheating_kernels_compile(planted) -> None:
    import cheats_cuda

    target, problem = gpu.find("h200"), planted.Backend().entry("tma_copy").named("1MB")
    for kind in ("kHonest", *cheats_cuda.CHEATS):
        [step] = cheats_cuda.Backend().build(
            cheats_cuda.IMPLEMENTATION, problem, Config(kind=kind), target
        )
        assert step["registers"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("problem", ["1MB", "64MB"])
def test_cheating_kernels_lose_on_a_gpu(planted, problem) -> None:
    import cheats_cuda

    pytest.importorskip("cupy")
    with Store.open() as store:
        report = tune("tma_copy", backend="cheats_cuda:Backend", store=store, problems=[problem],
                      regimes=["graph"], peers=False, progress=Quiet())  # fmt: skip
    failed = {row.config["kind"]: row.detail for row in report.rows if row.status == "wrong"}
    assert "kHonest" not in failed, failed["kHonest"]
    assert set(failed) == set(cheats_cuda.CHEATS)
    winners = report.problems[0].winners
    assert {winner.candidate.config["kind"] for winner in winners.values()} == {"kHonest"}
