"""The audit of cost models: predicted order against measured order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernelcat import catalog, paths
from kernelcat.catalog.spec import Problem
from kernelcat.cli import main
from kernelcat.report.predictions import (
    Audit,
    audit,
    judge,
    markdown,
    races_of,
    races_sheet,
    sheet,
    spearman,
    whole_spaces,
)
from kernelcat.runtime.gpu import SKUS, Gpu
from kernelcat.store import Measurement, Store, shipped
from kernelcat.store.audits import Audit as TuneAudit
from kernelcat.store.audits import AuditedProblem, ScreenedTimes

H200, B200 = SKUS["h200"], SKUS["b200"]
BOUND = 0.4
"""Part of a time that bytes or products must take at the GPU's peak rates to bound the time."""


def test_ranks_are_compared_and_ties_share_a_rank() -> None:
    assert spearman([1, 2, 3], [10, 20, 300]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(0.866, abs=1e-3)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0


def test_the_regret_of_the_first_configurations_by_estimate() -> None:
    times = [5.0, 4.0, 3.0, 2.0, 1.0]
    backwards = judge("p", [(float(place), us) for place, us in enumerate(times)])
    assert backwards.regret == {1: 5.0, 4: 2.0}  # the best of 16 of 5 would say nothing
    assert judge("p", [(us, us) for us in times]).regret == {1: 1.0, 4: 1.0}
    assert judge("p", [(1.0, us) for us in times]).regret[1] == 5.0, "a tie must not flatter"


@pytest.fixture
def rows() -> list[Measurement]:
    return [row for row in shipped() if row.entry == "tma_copy"]


def test_a_race_is_the_newest_run_and_has_no_peers(rows: list[Measurement]) -> None:
    entry = catalog.entry("tma_copy")
    before = races_of(entry, "h200", rows)
    assert before and not any("peer" in name for times in before.values() for name, _ in times)
    problem, times = next(iter(before.items()))
    (old, *_) = [r for r in rows if r.to_problem() == problem and (r.gpu, r.regime, r.state) ==
                 ("h200", "graph", "burst") and r.language != "peer"]  # fmt: skip
    new = replace(old, run="29990101T000000-aaaa", created_at="2999-01-01T00:00:00.000Z")
    assert len(times) > 1 and len(races_of(entry, "h200", [*rows, new])[problem]) == 1
    assert races_of(entry, "b200", rows) == {}


def test_the_audit_follows_the_measured_times(rows: list[Measurement]) -> None:
    """With the estimates as times a model is perfect; with their inverse it is as bad as can be."""
    entry = catalog.entry("tma_copy")
    by_name = {i.name: i for i in catalog.implementations("tma_copy")}

    def timed(sign: int) -> Iterator[Measurement]:
        for row in rows:
            each = by_name.get(f"{row.entry}/{row.language}/{row.variant}")
            if each is not None:
                estimate = each.estimate(row.to_problem(), row.to_config(), H200)
                us = estimate if sign > 0 else 1e6 / estimate
                yield replace(row, median_us=us, ci_us=(us, us))

    perfect, worst = (
        audit(entry, "h200", races_of(entry, "h200", timed(sign))) for sign in (1, -1)
    )
    assert perfect.spearman == pytest.approx(1) and set(perfect.regrets(1)) == {1.0}
    assert worst.spearman == pytest.approx(-1) and min(worst.regrets(1)) > 1
    (line,) = sheet("h200", [perfect]).lines
    assert line[:2] == ("tma_copy", str(len(perfect.races))) and line[3:6] == ("1.00",) * 3


def test_numbers_of_configurations_that_no_race_reaches_have_no_column() -> None:
    few, more = (
        Audit("gemm", "h200", (judge("p", [(us, us) for us in range(1, count)]),), 0)
        for count in (5, 7)
    )
    for made in (sheet("h200", [few]), races_sheet(few)):
        assert "best of 1" in made.headers and "best of 4" not in made.headers
    both = sheet("h200", [few, more])
    assert "best of 4" in both.headers and "best of 16" not in both.headers
    assert all(len(line) == len(both.headers) for line in both.lines)


def test_the_command_judges_shipped_rows_and_those_of_a_database(tmp_path, rows) -> None:
    def run(*words: str) -> list[dict]:
        result = CliRunner().invoke(main, ["predict", "--audit", "tma_copy", "--json", *words])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    (found,) = run()
    assert found["entry"] == "tma_copy" and -1 <= found["spearman"] <= 1
    assert {race["problem"] for race in found["races"]} >= {"64KB", "8GB"}
    path = tmp_path / "screens.sqlite3"
    with Store.open(str(path)) as store:
        burst = [row for row in rows if row.protocol["state"] == "burst"]
        store.add([replace(r, protocol={**r.protocol, "state": "screen"}) for r in burst])
    assert run("--db", str(path), "--state", "screen") == [found]
    assert run("--db", str(path))[0]["races"] == []
    text = CliRunner().invoke(main, ["predict", "--audit", "tma_copy"]).output
    assert "Predicted order on the h200" in text and "tile-odd-64MB" in text
    assert "give --audit" in CliRunner().invoke(main, ["predict"]).output


def test_whole_spaces_of_shipped_audits_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times that are the estimates make a perfect model, also among more than 16 configurations."""
    entry = catalog.entry("tma_copy")
    problem, other = entry.problems["64MB"], entry.problems["16MB"]
    tables = {}
    for each in catalog.implementations("tma_copy"):
        times = {c: each.estimate(problem, c, H200) for c in each.legal(problem, H200)}
        tables[each.name] = ScreenedTimes.of(times)
    tables["tma_copy/cuda/gone"] = ScreenedTimes(["tile"], [[1, 1e-3]])
    count = sum(len(table.rows) for table in tables.values()) - 1
    assert count > 100

    def audited(problem: Problem, times: dict[str, ScreenedTimes]) -> AuditedProblem:
        return AuditedProblem(problem.values, None, count, count, times=times)

    problems = audited(problem, tables), audited(other, {})  # the second was skipped
    tunes = TuneAudit("tma_copy", "h200", 64, ["tpe"], {}, "graph", "burst", "2026", {}, problems)
    older = replace(tunes, created_at="2025", problems=(audited(problem, {}),))
    data = paths.data
    monkeypatch.setattr(paths, "data", lambda n: tmp_path if n == "tuning_db" else data(n))
    tunes.write(tmp_path / "audit" / "1.jsonl")
    older.write(tmp_path / "audit" / "2.jsonl")
    command = ["predict", "--audit", "tma_copy", "--state", "screen", "--json"]
    [found] = json.loads(CliRunner().invoke(main, command).stdout)
    [race] = found["races"]
    assert (race["problem"], race["configs"]) == ("64MB", count)
    assert race["spearman"] == pytest.approx(1, abs=1e-3)  # times are kept in whole nanoseconds
    assert race["regret"] == {"1": 1.0, "4": 1.0, "16": 1.0}
    page = markdown(["h200"], [])
    assert "### Whole spaces" in page and "is not judged" not in page
    assert whole_spaces(entry, "b200", [tunes]) == {}


def test_no_b200_prediction_is_slower_than_the_h200_where_bytes_or_products_bound_both() -> None:
    """The least estimate for a B200 against the fastest kernel of both that an H200 has measured.

    Where neither bytes nor products bound both, latencies decide, which are the same.
    """
    measured = fastest_measured()
    slower, num_bound = [], 0
    for problem, us in measured.items():
        estimates = [
            implementation.estimate(problem, config, B200)
            for implementation in catalog.implementations(problem.entry)
            for config in implementation.configs(problem, B200)
        ]
        predicted_us = min(estimates, default=float("inf"))
        if min(bound(problem, H200) / us, bound(problem, B200) / predicted_us) >= BOUND:
            num_bound += 1
            slower += [(str(problem), us, predicted_us)] * (predicted_us > us)
    assert not slower
    assert num_bound > 100 and num_bound > len(measured) // 4, "else the test compares nothing"


def fastest_measured() -> dict[Problem, float]:
    """Problem -> least microseconds in a race on an H200 of kernels that serve a B200, too."""
    rows, fastest = list(shipped()), dict[Problem, float]()
    for name in catalog.names():
        serving = {each.name for each in catalog.implementations(name) if each.serves(B200.arch)}
        for problem, times in races_of(catalog.entry(name), "h200", rows).items():
            known = [us for (variant, _), us in times.items() if variant in serving]
            if known:
                fastest[problem] = min(known)
    return fastest


def bound(problem: Problem, gpu: Gpu) -> float:
    """Microseconds of the entry's bytes or products at the peak rates of ``gpu``."""
    entry = catalog.entry(problem.entry)
    dtype = str(problem.values.get("act_dtype", problem.values.get("dtype")))
    return gpu.roofline_us(entry.flops(problem), entry.bytes_moved(problem), dtype)
