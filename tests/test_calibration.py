"""Calibrated time models: the fit, the committed file, and what calls make of it."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from math import isclose
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from campaign import RUNS_ALL
from click.testing import CliRunner

from kernelcat import catalog
from kernelcat.call.calibrated import MATE_DOUBT, MATE_SHARE
from kernelcat.call.choice import choose
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.cli import main
from kernelcat.errors import StoreError
from kernelcat.reference.gemm import product
from kernelcat.report import calibration as fitting
from kernelcat.report.calibration import FEW_ROWS, Point, _line, _points, fit, raced, sample
from kernelcat.report.explain import Explanation
from kernelcat.report.left_out import LeftOut, Rows, left_out
from kernelcat.report.portfolio import Table, cover
from kernelcat.runtime.gpu import SKUS, Gpu
from kernelcat.store import calibration, lines
from kernelcat.store.calibration import (
    MODEL,
    NEAREST,
    NEAREST_THEN_MODEL,
    Calibrated,
    Coefficients,
    Member,
)
from kernelcat.store.snapshots import Choice, snapshot
from kernelcat.tune import calibrate as calibrating

H200 = SKUS["h200"]
ENTRY = catalog.entry("gemm")
PROBLEM, MATE, FAR = product(512, 4096, 4096), product(500, 4096, 4096), product(512, 4096, 2048)
FLAT = Coefficients(1.0, 0.0, 1.0, 10.0, 1000.0, 9, 1.0)


def member(variant: str) -> Member:
    implementation = catalog.implementation("gemm", "cuda", variant)
    return Member(f"cuda/{variant}", implementation.default(PROBLEM, H200))


def row(problem, variant: str) -> Choice:
    """A measured row of the H200 whose winner is ``variant``."""
    config = member(variant).config
    return Choice("gemm", "h200", problem, "cuda", variant, config, "measured", 40.0, "", "run",
                  "shipped")  # fmt: skip


def model(rule: str, **factors: float) -> dict[str, Calibrated]:
    """A model of gemm in which the variants are as many times slower as their estimates say."""
    coefficients = {f"cuda/{name}": replace(FLAT, factor=f) for name, f in factors.items()}
    return {"gemm": Calibrated(rule, {}, coefficients, tuple(member(name) for name in factors))}


def test_a_line_finds_factor_and_slope_and_is_constant_beyond_its_rows() -> None:
    points = [
        Point(us, 2.0 * us * (us / 32.0) ** 0.5) for us in [2.0**n for n in range(1, 10)] * 50
    ]
    line = _line(points)
    assert isclose(line.factor, 2.0, rel_tol=0.02) and isclose(line.slope, 0.5, abs_tol=0.02)
    assert (line.low_us, line.high_us, line.rows) == (2.0, 512.0, 450) and line.spread < 1.03
    for estimate, us in points:
        assert isclose(line.predict(estimate), us, rel_tol=0.05)
    ratio = line.predict(512.0) / 512.0
    assert isclose(line.predict(51200.0), 51200.0 * ratio)  # not 10 times that


def test_few_rows_move_a_prediction_less_than_many() -> None:
    one, many = _line([Point(10.0, 40.0)]), _line([Point(10.0, 40.0)] * 100)
    assert isclose(one.factor, 2.0, rel_tol=1e-3) and isclose(many.factor, 4.0, rel_tol=0.02)
    assert one.slope == many.slope == 0.0


def test_the_least_predicted_time_serves_where_the_rule_says_so() -> None:
    def served(models, *rows: Choice):
        decision = choose(ENTRY, PROBLEM, H200, rows, models=models)
        return decision.implementation.variant, decision.why

    slow_tma = {"wgmma": 1.0, "tma": 100.0}
    slow_wgmma = {"wgmma": 100.0, "tma": 1.0}
    assert served(model(MODEL, **slow_tma)) == ("wgmma", "calibrated")
    assert served(model(MODEL, **slow_wgmma)) == ("tma", "calibrated")
    assert served(model(NEAREST, **slow_wgmma))[1] == "default"
    near = row(FAR, "wgmma")
    assert served(model(MODEL, **slow_wgmma), near) == ("tma", "calibrated")
    assert served(model(NEAREST_THEN_MODEL, **slow_wgmma), near) == ("wgmma", "nearest")
    assert served(model(NEAREST_THEN_MODEL, **slow_wgmma)) == ("tma", "calibrated")
    # What was measured counts more than what is predicted; a row of the bucket is one prediction.
    assert served(model(MODEL, **slow_wgmma), row(PROBLEM, "wgmma")) == ("wgmma", "exact")
    both_slow = {"wgmma": 100.0, "tma": 100.0}
    assert served(model(MODEL, **both_slow), row(MATE, "wgmma")) == ("wgmma", "bucket")
    assert served(model(MODEL, **slow_wgmma), row(MATE, "wgmma")) == ("tma", "calibrated")
    assert served(model(NEAREST, **slow_wgmma), row(MATE, "wgmma")) == ("wgmma", "bucket")


def test_a_prediction_is_compared_with_its_doubt() -> None:
    models = model(MODEL, wgmma=10.0, tma=9.0)
    doubtful = replace(models["gemm"].coefficients["cuda/tma"], spread=1.5)
    models["gemm"].coefficients["cuda/tma"] = doubtful
    best, other = choose(ENTRY, PROBLEM, H200, (), models=models).predictions
    assert best.variant == "wgmma" and best.high_us == best.us
    assert isclose(other.high_us, other.us * 1.5 ** models["gemm"].caution)


def test_a_row_of_the_bucket_moves_the_prediction_of_the_model_by_a_share() -> None:
    models, mate = model(MODEL, wgmma=3.0), row(MATE, "wgmma")
    found = choose(ENTRY, PROBLEM, H200, (mate,), models=models).predictions
    alone, moved = sorted(found, key=lambda prediction: prediction.evidence is not None)
    assert (alone.config, moved.config) == (mate.config, mate.config) and moved.evidence == mate
    wgmma = catalog.implementation("gemm", "cuda", "wgmma")
    row_us = 3.0 * wgmma.estimate(MATE, mate.config, H200)
    assert isclose(moved.us, alone.us * (mate.median_us / row_us) ** MATE_SHARE)
    # Without coefficients there is nothing but the row to go by.
    estimates = [wgmma.estimate(problem, mate.config, H200) for problem in (PROBLEM, MATE)]
    scaled_us = mate.median_us * estimates[0] / estimates[1]
    [moved] = [p for p in choose(ENTRY, PROBLEM, H200, (mate,), models=model(MODEL, tma=1e9))
               .predictions if p.evidence]  # fmt: skip
    assert isclose(moved.us, scaled_us) and isclose(moved.high_us, scaled_us * MATE_DOUBT)


def test_a_portfolio_serves_each_problem_almost_as_well_as_all_contestants() -> None:
    a, b, c = (("gemm/cuda/tma", Config({"number": n})) for n in range(3))
    served = [{a: 10.0, b: 11.0}, {b: 20.0, c: 19.0}, {c: 30.0}, {b: 5.0, a: 9.0}]
    table = Table.of(served)
    assert cover(table, 1) == [b]
    assert cover(table, 2) == [b, c]
    assert cover(table, 9) == [b, c, a]
    assert cover(Table.of([{a: 10.0, b: 10.0001}, {b: 7.0}]), 9) == [b]  # a gains too little
    assert cover(Table.of([{}, {c: 1.0}]), 9) == [c] and cover(Table.of([]), 9) == []
    halves = Table.of(served[:2]).beside(Table.of(served[2:]))
    assert halves.contestants == table.contestants
    assert (halves.log_us == table.log_us).all()


def test_many_predictions_are_those_of_one_at_a_time() -> None:
    line = replace(model(MODEL, wgmma=2.0)["gemm"].coefficients["cuda/wgmma"], slope=0.3,
                   low_us=4.0, center_us=9.0, high_us=20.0)  # fmt: skip
    estimates = [1.0, 4.0, 7.0, 20.0, 300.0]
    assert np.allclose(np.exp(line.log_predict(np.log(estimates))), [*map(line.predict, estimates)])


def test_a_prediction_that_cannot_serve_gives_way_to_the_next() -> None:
    models = model(MODEL, wgmma=100.0, tma=1.0)
    failed = {("gemm/cuda/tma", member("tma").config.key): "does not compile"}
    decision = choose(ENTRY, PROBLEM, H200, (), failed=failed, models=models)
    assert (decision.implementation.variant, decision.why) == ("wgmma", "calibrated")
    gone = (Member("cuda/gone", member("tma").config),)
    broken = replace(models["gemm"], portfolio=gone, coefficients={"cuda/gone": FLAT})
    decision = choose(ENTRY, PROBLEM, H200, (), models={"gemm": broken})
    assert decision.why == "default"


def test_defaults_are_predicted_where_the_portfolio_has_naive_kernels_alone() -> None:
    """A portfolio is made for sizes that models have; K=3457 is served by pointers alone."""
    odd = product(21, 222, 3457)
    models = model(MODEL, wgmma=0.1, tiled=9.0, naive=1e-6)
    models["gemm"].coefficients["triton/tiled"] = FLAT
    wgmma_only = replace(models["gemm"], portfolio=(member("wgmma"), member("naive")))
    decision = choose(ENTRY, odd, H200, (), models={"gemm": wgmma_only})
    assert {p.variant for p in decision.predictions} == {"naive", "tiled"}
    assert (decision.implementation.variant, decision.why) == ("naive", "calibrated")
    slow_naive = {**wgmma_only.coefficients, "cuda/naive": replace(FLAT, factor=1e6)}
    slow = replace(wgmma_only, coefficients=slow_naive)
    decision = choose(ENTRY, odd, H200, (), models={"gemm": slow})
    assert decision.implementation.name == "gemm/triton/tiled"
    assert decision.config == decision.implementation.default(odd, H200)
    # Where the portfolio has more than naive kernels, nothing else is predicted.
    decision = choose(ENTRY, PROBLEM, H200, (), models={"gemm": slow})
    assert {p.variant for p in decision.predictions} == {"wgmma", "naive"}


def test_explain_says_what_was_predicted() -> None:
    decision = choose(ENTRY, PROBLEM, H200, (), models=model(MODEL, wgmma=2.0, tma=9.0))
    text = str(Explanation.of(PROBLEM, H200, decision))
    by_variant = {p.variant: p for p in decision.predictions}
    assert decision.missed and "calibrated: the least time" in text
    assert f"predicted: {by_variant['wgmma']}, the least of 2 configurations" in text
    assert f"then cuda/tma {by_variant['tma']}" in text


MODELS = [(sku, name) for sku in ("h200", "h100") for name in sorted(calibration.models(sku))]
SLOW = {"flashmla", "fp8_gemm", "gemm", "moe_mlp", "out_router", "paged_attn"}
"""Entries whose portfolio is fitted in a quarter of a minute or more, in campaigns only: what it
follows from is compared all the same."""


def fitted(sku: str, name: str, widened: bool) -> Calibrated:
    """The model as it follows from today's rows and estimates; the rule is the committed one."""
    entry, committed = catalog.entry(name), calibration.models(sku)[name]
    return fit(entry, SKUS[sku], raced(entry, sku), committed.rule, widened, committed.caution)


@pytest.mark.parametrize(("sku", "name"), MODELS)
def test_the_committed_coefficients_follow_from_todays_rows_and_estimates(
    sku: str, name: str
) -> None:
    """Else run ``kernelcat calibrate --all``."""
    committed, found = calibration.models(sku)[name], fitted(sku, name, widened=False)
    assert found.coefficients.keys() == committed.coefficients.keys()
    for each, numbers in found.coefficients.items():
        known = committed.coefficients[each]
        assert isclose(numbers.factor, known.factor, rel_tol=1e-3), each
        assert isclose(numbers.slope, known.slope, abs_tol=1e-3), each
    assert committed.estimates == (sample(name, SKUS[sku]) if committed.widened else "")
    is_least = committed.judged[committed.rule].mean <= committed.judged[NEAREST].mean
    assert is_least or calibrating._promises(Rows(catalog.entry(name), sku), committed)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("sku", "name"), [each for each in MODELS if RUNS_ALL or each[1] not in SLOW]
)
def test_the_committed_portfolios_follow_from_todays_rows_and_estimates(
    sku: str, name: str
) -> None:
    """Else run ``kernelcat calibrate --all``."""
    committed = calibration.models(sku)[name]
    assert fitted(sku, name, committed.widened).portfolio == committed.portfolio


def test_a_sample_of_estimates_tells_other_estimates(monkeypatch) -> None:
    before = sample.__wrapped__("rms_norm", H200)
    assert (
        before
        == sample.__wrapped__("rms_norm", H200)
        != sample.__wrapped__("rms_norm", SKUS["h100"])
    )
    estimates = fitting._estimates

    def slower(problem: Problem, gpu: Gpu) -> dict[tuple[str, Config], float]:
        found = estimates(problem, gpu)
        last = max(found, key=lambda each: each[1].key)
        return {**found, last: 1.001 * found[last]}

    monkeypatch.setattr(fitting, "_estimates", slower)
    assert sample.__wrapped__("rms_norm", H200) != before


def test_a_kernel_that_a_gpu_has_not_raced_takes_a_siblings_coefficients() -> None:
    name, entry = "tma_copy/cuda/bulk", catalog.entry("tma_copy")
    every = raced(entry, "h200")
    rest = {problem: {each: us for each, us in times.items() if each[0] != name}
            for problem, times in every.items()}  # fmt: skip
    own, lent = fit(entry, H200, every, MODEL), fit(entry, H200, rest, MODEL)
    sibling = _points(raced(entry, "h100"), SKUS["h100"])[name]
    assert lent.coefficients["cuda/bulk"] == _line(sibling)
    assert lent.coefficients["cuda/bulk"] != own.coefficients["cuda/bulk"]
    assert lent.coefficients.keys() == own.coefficients.keys()


def test_few_rows_of_a_kernel_are_joined_by_a_siblings() -> None:
    name, entry = "tma_copy/cuda/bulk", catalog.entry("tma_copy")
    every = raced(entry, "h200")
    known = [problem for problem, times in every.items() if any(each[0] == name for each in times)]
    few = {problem: every[problem] for problem in known[:2]}
    own = sum(each[0] == name for times in few.values() for each in times)
    lent = sum(each[0] == name for times in raced(entry, "h100").values() for each in times)
    assert 0 < own < FEW_ROWS and lent
    assert fit(entry, H200, few, MODEL).coefficients["cuda/bulk"].rows == own + lent


def test_naive_kernels_serve_only_where_one_has_won() -> None:
    """What takes milliseconds says nothing about microseconds."""
    winners = {f"{row.entry}/{row.language}/{row.variant}" for row in lines.shipped() if row.winner}
    for name, model in calibration.models("h200").items():
        served = {f"{name}/{member.implementation}" for member in model.portfolio}
        assert {each for each in served if each.endswith("/naive")} <= winners


def test_a_committed_judgement_follows_from_todays_rows() -> None:
    committed = calibration.models("h200")["multicast_gemm"]
    found = left_out(catalog.entry("multicast_gemm"), "h200")
    losses = [each.variant_us / each.best_us for each in found if each.variant_us]
    assert committed.rule == MODEL and len(losses) == committed.judged[MODEL].problems
    assert isclose(max(losses) - 1, committed.judged[MODEL].worst, abs_tol=1e-3)


@pytest.mark.parametrize(
    ("promised", "rule"), [([0.9] * 5, MODEL), ([0.9] * 4, NEAREST), ([1.1] * 5, NEAREST)]
)
def test_random_races_decide_where_estimates_contradict_the_nearest_winner(
    monkeypatch, promised: list[float], rule: str
) -> None:
    """By its variant the nearest winner loses nothing; its configuration is 1.3 times slower."""
    judged = {NEAREST: LeftOut("", "", "", 10.0, 10.0, None, 13.0),
              MODEL: LeftOut("", "", "", 10.0, 10.5, None, 10.5),
              NEAREST_THEN_MODEL: LeftOut("", "", "", 10.0, 10.6, None, 12.0)}  # fmt: skip
    rows = SimpleNamespace(
        gpu=H200, times=[()] * 9, promised=lambda model: promised,
        judge=lambda asked, widened, caution=1.5: [judged[asked]],
    )  # fmt: skip
    monkeypatch.setattr(calibrating, "Rows", lambda entry, sku: rows)
    monkeypatch.setattr(
        calibrating, "fit",
        lambda entry, gpu, times, rule, widened, caution: Calibrated(rule, {}, {}, ()),
    )  # fmt: skip
    found = calibrating.calibrate(ENTRY, "h200").model
    assert found.rule == rule and found.judged[NEAREST].mean == 0.0


def test_a_widened_portfolio_knows_measured_problems_by_predictions(monkeypatch) -> None:
    """What has raced is the least promising configuration that is worth a try."""
    monkeypatch.setattr(fitting, "_random_estimates", lambda name, gpu: Table.of([]))
    wgmma = catalog.implementation("gemm", "cuda", "wgmma")
    estimates = {c: wgmma.estimate(PROBLEM, c, H200) for c in wgmma.configs(PROBLEM, H200)}
    worst = max(estimates, key=lambda config: estimates[config])
    times = {PROBLEM: {(wgmma.name, worst): estimates[worst]}}
    raced_member = Member("cuda/wgmma", worst)
    assert fit(ENTRY, H200, times, MODEL).portfolio == (raced_member,)
    widened = fit(ENTRY, H200, times, MODEL, widened=True)
    assert widened.portfolio and raced_member not in widened.portfolio


def test_what_lost_every_race_is_not_predicted_for_random_problems(monkeypatch) -> None:
    """`tma` has the smaller estimate; in nine or ten problems it took so many times as long."""
    wgmma, tma = [(f"gemm/cuda/{name}", member(name).config) for name in ("wgmma", "tma")]
    estimates, points = Table.of([{wgmma: 20.0, tma: 10.0}]), [Point(10.0, 10.0)] * 40
    monkeypatch.setattr(fitting, "_random_estimates", lambda name, gpu: estimates)
    monkeypatch.setattr(fitting, "_known_estimates", lambda problem, gpu: {})
    monkeypatch.setattr(
        fitting, "_points", lambda times, gpu: dict.fromkeys((wgmma[0], tma[0]), points)
    )

    def served(problems: int, ratio: float, *races: dict[tuple[str, Config], float]) -> set[str]:
        monkeypatch.setattr(fitting, "_contested", lambda name, sku: races)
        known = [product(512, 4096, 64 * k) for k in range(1, 1 + problems)]
        times = {problem: {wgmma: 1.0, tma: ratio} for problem in known}
        portfolio = fit(ENTRY, H200, times, MODEL, widened=True).portfolio
        return {each.implementation for each in portfolio}

    assert served(9, 1.5) == served(10, 1.02) == {"cuda/tma"}
    assert served(10, 1.5) == served(9, 1.5, {wgmma: 1.0, tma: 2.0}) == {"cuda/wgmma"}
    assert served(10, 1.5, {wgmma: 2.0, tma: 1.0}) == {"cuda/tma"}, "a tune chose it"


def test_of_two_rules_that_ask_a_widened_model_the_one_that_likely_loses_less_is_kept() -> None:
    """The nearest winner's variant is fast, and its configuration is for other sizes."""
    judged = {NEAREST: LeftOut("", "", "", 10.0, 12.0, None, 12.0),
              NEAREST_THEN_MODEL: LeftOut("", "", "", 10.0, 10.1, None, 12.0),
              MODEL: LeftOut("", "", "", 10.0, 10.5, None, 10.6)}  # fmt: skip
    for is_wide, rule in ((True, MODEL), (False, NEAREST_THEN_MODEL)):
        found = {each: [left] for each, left in judged.items()}
        assert calibrating._Judged(is_wide, 1.5, found).best_of_models == rule


@pytest.mark.parametrize(("bold_us", "caution"), [(10.4, 0.5), (10.5, 1.5), (10.6, 1.5)])
def test_a_model_has_the_caution_with_which_it_loses_least(
    monkeypatch, bold_us: float, caution: float
) -> None:
    def judge(rule: str, widened: bool, caution: float = 1.5) -> list[LeftOut]:
        us = 11.0 if rule == NEAREST else bold_us if caution == 0.5 else 10.5
        return [LeftOut("", "", "", 10.0, us, None, us)]

    rows = SimpleNamespace(gpu=H200, times={PROBLEM: {}} | dict.fromkeys(range(9)), judge=judge)
    monkeypatch.setattr(calibrating, "Rows", lambda entry, sku: rows)
    monkeypatch.setattr(
        calibrating, "fit",
        lambda entry, gpu, times, rule, widened, caution: Calibrated(
            rule, {}, {}, (), widened, caution
        ),
    )  # fmt: skip
    found = calibrating.calibrate(ENTRY, "h200").model
    assert found is not None and found.caution == caution
    assert Calibrated.from_json(found.to_json()) == found


@pytest.mark.parametrize("name", ["gemm", "flashmla", "nvfp4_matmul", "paged_attn", "sample"])
def test_the_choice_for_a_new_problem_takes_about_a_millisecond(name: str) -> None:
    entry, dice = catalog.entry(name), Random(7)
    rows, refuted = snapshot().choices(name), snapshot().refuted(name)

    def is_quick() -> bool:
        times, limits, reasons = [], [], set()
        for problem in [entry.random_problem(dice) for _ in range(25)]:
            start = time.thread_time()
            decision = choose(entry, problem, H200, rows, refuted=refuted)
            chosen = time.thread_time()
            sum(number * number % 7 for number in range(37_500))  # 2 ms on an idle core
            limits.append(time.thread_time() - chosen)
            times.append(chosen - start)
            reasons.add(decision.why)
        assert "calibrated" in reasons
        return statistics.median(times) < statistics.median(limits)

    # Of gemm 1.5 ms on an idle core. A core that is shared takes longer for both, but not equally,
    # so a round that was disturbed is repeated.
    assert any(is_quick() for _ in range(5))


def test_a_file_that_holds_no_models_is_an_error(monkeypatch, tmp_path) -> None:
    file = tmp_path / "nvidia-h200.json"
    monkeypatch.setattr(calibration, "path", lambda sku: file)
    calibration.models.cache_clear()
    assert calibration.models("h200") == {}
    saved = model(MODEL, wgmma=2.0, tma=3.0)
    calibration.save("h200", saved)
    assert calibration.models("h200") == saved
    file.write_text(json.dumps({"gemm": {**saved["gemm"].to_json(), "rule": "magic"}}))
    calibration.models.cache_clear()
    with pytest.raises(StoreError, match="magic"):
        calibration.models("h200")
    monkeypatch.undo()
    calibration.models.cache_clear()


def test_models_of_other_entries_stay_and_one_that_is_no_more_goes(monkeypatch, tmp_path) -> None:
    file = tmp_path / "models.json"
    monkeypatch.setattr(calibration, "path", lambda sku: file)
    calibration.models.cache_clear()
    mine, [other] = model(MODEL, tma=1.0), model(NEAREST, wgmma=2.0).values()
    assert calibration.models("h200") == {}  # remembered, while another process writes
    file.write_text(json.dumps({"fp8_gemm": other.to_json()}))
    calibration.save("h200", mine)
    assert calibration.models("h200") == {**mine, "fp8_gemm": other}
    calibration.save("h200", {"fp8_gemm": None})  # too few of its problems are measured now
    assert calibration.models("h200") == mine
    monkeypatch.undo()
    calibration.models.cache_clear()


def test_a_gpu_without_a_model_takes_that_of_the_nearest_sibling(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(calibration, "path", lambda sku: tmp_path / f"{sku}.json")
    calibration.models.cache_clear()
    calibration.save("h200", model(MODEL, wgmma=100.0, tma=1.0))
    calibration.save("h100-pcie", model(MODEL, wgmma=1.0, tma=100.0))
    calibration.save("b200", model(MODEL, wgmma=1.0, tma=100.0))

    def served(gpu: str, *rows: Choice) -> tuple[str, str]:
        decision = choose(ENTRY, PROBLEM, SKUS[gpu], rows)
        return decision.implementation.variant, decision.why

    assert served("h100") == ("tma", "borrowed model")  # 4.8 TB/s are nearer to 3.35 than 2.04 are
    assert served("h200") == ("tma", "calibrated")
    assert served("h100", row(PROBLEM, "wgmma")) == ("wgmma", "borrowed")
    assert served("h100", row(MATE, "wgmma")) == ("wgmma", "borrowed")
    assert served("a100")[1] == "default"
    calibration.save("h100", model(NEAREST, wgmma=1.0, tma=1.0))
    assert served("h100")[1] == "default"  # its own model says that it should not serve
    monkeypatch.undo()
    calibration.models.cache_clear()
    calibration.lent.cache_clear()


def test_the_command_shows_what_rules_lose_and_writes_nothing_when_dry() -> None:
    before = calibration.path("h200").read_text()
    result = CliRunner().invoke(main, ["calibrate", "multicast_gemm", "mla_kv_write", "--dry-run"])
    assert result.exit_code == 0 and "multicast_gemm" in result.output
    assert "mla_kv_write: no model, 0 measured problems are fewer than 5" in result.output
    assert calibration.path("h200").read_text() == before
    assert CliRunner().invoke(main, ["calibrate"]).exit_code != 0


def test_the_command_writes_nothing_where_no_model_comes_or_goes(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(calibration, "path", lambda sku: tmp_path / "models" / f"{sku}.json")
    calibration.models.cache_clear()
    result = CliRunner().invoke(main, ["calibrate", "mla_kv_write", "--gpu", "b200"])
    assert "no model, 0 measured problems" in result.output and "written" not in result.output
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    calibration.models.cache_clear()
