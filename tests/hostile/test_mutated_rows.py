"""Real rows with values replaced by others: no call breaks, and no impossible row is chosen."""

from __future__ import annotations

import dataclasses
import json
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from campaign import RUNS_ALL, share
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from real_rows import LOCAL, Machine, raced
from sqlalchemy import text

import kernelcat
from kernelcat import catalog
from kernelcat.errors import InvalidArgument
from kernelcat.store import Measurement, Store, snapshots
from kernelcat.store.models import measurements, to_row

MUTATED = 20
"""Mutated rows in a database."""
junk = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.integers(-(1 << 70), 1 << 70),
    st.floats(), st.text(max_size=12), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Target:
    """A problem that calls are made for, and its real rows."""

    entry: str
    problem: Any
    rows: tuple[Measurement, ...]
    least_us: float  # by the datasheet of an H200: no kernel can be faster

    @staticmethod
    def of(name: str, problem_name: str, flops: float) -> Target:
        entry = catalog.entry(name)
        problem = entry.named(problem_name)
        rows = raced(name, problem_name)
        seconds = max(entry.flops(problem) / flops, entry.bytes_moved(problem) / 4.8e12)
        return Target(name, problem, rows, 1e6 * seconds)


TARGETS = [
    Target.of("gemm", "4096x4096x4096", 989.5e12),
    Target.of("flashmla", "128x1-64-4096", 989.5e12),
    Target.of("paged_attn", "decode-16x32768-32/8x128-p16", 989.5e12),
    Target.of("fp8_gemm", "4096x7168x2048", 1979e12),
    Target.of("fp8_quantize", "8192x8192-1x128", 989.5e12),
    Target.of("kv_write", "prefill-8192-32/8x128-fp8", 989.5e12),
]


UNMEASURED = {
    "gemm": ({"M": 4000}, {"M": 1}, {"dtype": "float16", "bias": True}),
    "fp8_gemm": ({"M": 300}, {"M": 1}),
    "fp8_quantize": ({"M": 77}, {"dtype": "float16"}),
}
"""Entry -> changed axes of problems that go by the nearest measured one."""


@st.composite
def mutations(draw: st.DrawFn, target: Target) -> dict[str, Any]:
    """The JSON of a real row with one to three values replaced, at the top or inside an object."""
    record = json.loads(json.dumps(draw(st.sampled_from(target.rows)).to_json()))
    record |= {"run": "forged", "created_at": "2026-11-23T00:00:00Z"}
    for _ in range(draw(st.integers(1, 3))):
        field = draw(st.sampled_from([*record, "median_us", "config", "problem", "created_at"]))
        value, nice = record[field], {
            "median_us": st.floats(1e-3, 2.2 * target.least_us),
            "created_at": st.datetimes().map(lambda moment: f"{moment.isoformat()}Z"),
            "max_error": st.floats(0, 1e300),
            "gpu": st.sampled_from(["h200", "b200", "h100", "h200-mig-1g.18gb"]),
        }  # fmt: skip
        if isinstance(value, dict) and value:
            key = draw(st.sampled_from(sorted(value)))
            others = [row.config.get(key) for row in target.rows]
            value[key] = draw(st.one_of(junk, st.sampled_from(others)))
        else:
            record[field] = draw(nice.get(field, junk) if draw(st.booleans()) else junk)
    us = record["median_us"]
    if isinstance(us, float) and record["ci_us"] is not None:
        record["ci_us"] = [us, us]
    return record


def put(store: Store, target: Target, records: list[dict[str, Any]]) -> None:
    """Store rows past every check of an import; values that no row may have go in by SQL."""
    rows, broken = [], []
    for record in records:
        try:
            row = Measurement.from_json(record)
            row.line()  # an infinite number is no JSON
        except InvalidArgument:
            broken.append(record)
        else:
            rows.append(row)
    store.add(rows)
    with store.engine.begin() as connection:
        for record in broken:
            values = to_row(dataclasses.replace(target.rows[0], **LOCAL)) | {
                "digest": uuid4().hex,
                "run": "forged",
            }
            for field in ("problem", "config", "environment"):
                values[field] = json.dumps(record[field], default=str)
            for field in ("language", "variant", "gpu", "source", "kind", "median_us"):
                value = record[field]
                if isinstance(value, (str, float)) and value == value:  # SQLite stores NaN as NULL
                    values[field] = value
            names, places = ", ".join(values), ", ".join(f":{name}" for name in values)
            statement = f"INSERT INTO {measurements.name} ({names}) VALUES ({places})"
            connection.execute(text(statement), values)


def is_possible(target: Target, decision: Any) -> bool:
    """Whether a choice is possible, by other code than the package's."""
    implementation, row = decision.implementation, decision.evidence.row
    in_space = all(
        any(repr(value) == repr(decision.config[name]) for value in values)
        for name, values in implementation.space.items()
    )
    tomorrow = datetime.now(UTC) + timedelta(days=1, hours=1)
    is_dated = row.origin == "shipped" or row.created_at[:16] <= f"{tomorrow:%Y-%m-%dT%H:%M}"
    is_here = row.gpu == row.environment["sku"] == "h200"
    is_timed = row.median_us >= 0.999 * target.least_us
    return in_space and is_timed and is_dated and is_here and (row.max_error or 0) < 1e5


@pytest.mark.campaign
def test_mutated_rows_break_no_call_and_no_forged_row_is_chosen(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50,000 mutated rows, 20 to a database; without a campaign, 240 of them."""
    known = {target.entry: list(snapshots._shipped(target.entry)) for target in TARGETS}
    monkeypatch.setattr(snapshots, "_shipped", lambda name: known[name])
    assert all(target.rows for target in TARGETS)

    @settings(
        max_examples=share(50_000 // MUTATED) // (1 if RUNS_ALL else 10),
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(TARGETS).flatmap(
            lambda target: st.tuples(
                st.just(target), st.lists(mutations(target), min_size=MUTATED, max_size=MUTATED)
            )
        )
    )
    def attack(example: tuple[Target, list[dict[str, Any]]]) -> None:
        target, records = example
        path = tmp_path / "hostile.sqlite3"
        path.unlink(missing_ok=True)
        monkeypatch.setenv("KERNELCAT_DB", str(path))
        with Store.open() as store:
            put(store, target, records)
        kernelcat.reload()
        operator_, values = kernelcat.get(target.entry), target.problem.values
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            decision = operator_.plan(**values).decision
            assert decision.config.key in {config_key(config) for _, config in machine.loads[-1:]}
            assert is_possible(target, decision), decision
            for changes in UNMEASURED.get(target.entry, ({},)):
                operator_.explain(**values | changes, gpu="h200")

    attack()


def config_key(config: dict[str, Any]) -> str:
    return json.dumps(config, sort_keys=True, separators=(",", ":"))
