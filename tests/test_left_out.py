"""Dispatch judged by rows: what serves a problem without its bucket, and what that costs."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.cli import main
from kernelcat.reference.gemm import product
from kernelcat.report import left_out as module
from kernelcat.report.left_out import LeftOut, Rows, sheet, skus
from kernelcat.runtime.gpu import SKUS
from kernelcat.store.calibration import MODEL, NEAREST, Calibrated, Coefficients, Member
from kernelcat.store.random_races import RandomRace
from kernelcat.store.snapshots import Choice

ENTRY, H200 = catalog.entry("gemm"), SKUS["h200"]
LARGE, SMALL, NEAR = product(4096, 4096, 4096), product(1024, 4096, 4096), product(4000, 4096, 4096)
TIMES = {LARGE: {"wgmma": 100.0, "tma": 150.0}, SMALL: {"wgmma": 36.0, "tma": 30.0},
         NEAR: {"wgmma": 99.0}}  # fmt: skip


def config(variant: str):
    """A configuration that serves all three problems."""
    if variant == "wgmma":
        return Config(
            tile="128x256", schedule="cooperative", swap=False, cluster="1x1", split_k=1
        )  # fmt: skip
    return catalog.implementation("gemm", "cuda", variant).default(LARGE, H200)


@pytest.fixture
def rows(monkeypatch) -> list[SimpleNamespace]:
    """Rows of three problems, two of them in one bucket, and the choices that follow from them."""
    rows, choices = [], []
    for problem, times in TIMES.items():
        for variant, us in sorted(times.items(), key=lambda pair: pair[1]):
            row = {"entry": "gemm", "gpu": "h200", "problem": problem.values, "language": "cuda",
                   "variant": variant, "config": dict(config(variant)), "median_us": us,
                   "regime": "graph", "state": "burst"}  # fmt: skip
            rows.append(SimpleNamespace(**row))
            choices.append(
                Choice("gemm", "h200", problem, "cuda", variant, config(variant), "measured", us,
                       "", "run", "shipped")
            )  # fmt: skip
    monkeypatch.setattr(module.lines, "shipped", lambda: rows)
    monkeypatch.setattr(module, "snapshot", lambda: SimpleNamespace(choices=lambda name: choices))
    monkeypatch.setattr(module.calibration, "models", lambda sku: {})  # the nearest problem serves
    return rows


def test_a_problem_is_served_by_another_bucket_and_judged_by_its_own_rows(rows) -> None:
    large, small, near = Rows(ENTRY, "h200").judge(NEAREST, False)
    name = "gemm/cuda/tma"
    assert large == LeftOut("4096x4096x4096", name, "nearest", 100.0, 150.0, 150.0, 150.0)
    assert small.implementation == "gemm/cuda/wgmma" and small.us == 36.0 and small.best_us == 30.0
    assert near.implementation == name and near.variant_us is near.us is near.likely_us is None
    notes = sheet("gemm", "h200", [large, small, near]).notes
    assert "34.2% in the mean of 2, 50.0% at worst" in notes[0]
    rows[1].config = {"tile": "none"}  # no configuration of today's space
    large = Rows(ENTRY, "h200").judge(NEAREST, False)[0]
    assert large.implementation == name and large.variant_us is large.us is None


def test_a_configuration_that_did_not_race_likely_takes_what_the_estimates_say(rows) -> None:
    """The small problem's winner serves the large one, where another tile of that kernel raced."""
    raced = Config({**config("tma"), "num_stages": 4})
    assert config("tma")["num_stages"] != 4
    rows[1].config = raced
    large = Rows(ENTRY, "h200").judge(NEAREST, False)[0]
    assert (large.variant_us, large.us) == (150.0, None)
    estimate = catalog.implementation("gemm", "cuda", "tma").estimate
    ratio = estimate(LARGE, config("tma"), H200) / estimate(LARGE, raced, H200)
    assert large.likely_us == pytest.approx(max(150.0 * ratio, 100.0))


def test_random_races_that_the_nearest_row_served_say_what_a_model_promises(
    rows, monkeypatch
) -> None:
    model = Calibrated(
        MODEL, {}, {"cuda/wgmma": Coefficients(1.0, 0.0, 1.0, 10.0, 1e4, 9, 1.0)},
        (Member("cuda/wgmma", config("wgmma")),),
    )  # fmt: skip
    estimate_us = catalog.implementation("gemm", "cuda", "wgmma").estimate(
        SMALL, config("wgmma"), H200
    )
    served = RandomRace(0, SMALL.values, why="nearest", us=2 * estimate_us)
    others = [replace(served, why="calibrated"), replace(served, us=None)]
    files = [SimpleNamespace(gpu=sku, races=(served, *others)) for sku in ("h200", "h100")]
    monkeypatch.setattr(module.random_races, "shipped", lambda name: files)
    assert Rows(ENTRY, "h200").promised(model) == [pytest.approx(0.5)]


def test_the_command_shows_the_gpus_that_have_rows(rows) -> None:
    assert skus(ENTRY) == ["h200"] and skus(catalog.entry("tma_copy")) == []
    text = CliRunner().invoke(main, ["regret", "gemm", "--left-out"]).output
    assert "gemm on h200" in text and "34.2% in the mean of 2" in text
    values = json.loads(CliRunner().invoke(main, ["regret", "gemm", "--left-out", "--json"]).stdout)
    assert [each["us"] for each in values["h200"]] == [150.0, 36.0, None]
    none = CliRunner().invoke(main, ["regret", "tma_copy", "--left-out"]).output
    assert "No measured rows of tma_copy" in none
