"""Measurements: validation of every field, and conversion to JSON and back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument
from kernelcat.store import Measurement, new_run, now
from kernelcat.store.measurement import LINE_BYTES

ROW: dict[str, Any] = json.loads(Path(__file__).with_name("measurement.json").read_text())
FAILED = {"status": "timeout", "median_us": None, "ci_us": None, "samples": 0}
PREDICTED = {"kind": "predicted", "ci_us": None, "samples": 0}


def measurement(**changes: Any) -> Measurement:
    return Measurement.from_json(ROW | changes)


def test_keys_are_those_of_the_shipped_format() -> None:
    optional = ["detail", "sqnr_db", "winner", "quantiles_us"]
    assert [*ROW, *optional] == [field.name for field in dataclasses.fields(Measurement)]


def test_optional_fields_are_in_the_json_only_when_set() -> None:
    assert not {"detail", "sqnr_db", "winner", "quantiles_us"} & measurement().to_json().keys()
    assert (
        measurement(sqnr_db=0, winner=True).to_json().items()
        >= {"sqnr_db": 0, "winner": True}.items()
    )
    assert measurement(sqnr_db=17).to_json()["sqnr_db"] == 17.0
    assert measurement(quantiles_us=(179, 181.5)).to_json()["quantiles_us"] == [179.0, 181.5]
    assert measurement(**FAILED, detail="hung").to_json()["detail"] == "hung"


def test_detail_becomes_one_printable_line() -> None:
    row = measurement(**FAILED, detail="error:\n  line 3\x1b[31m\t" + "x" * 9000)
    assert row.detail is not None and row.detail.startswith("error: line 3?[31m x")
    assert len(row.detail) == 2000


@pytest.mark.parametrize("changes", [FAILED, PREDICTED, {"language": "peer", "config": {}}])
def test_rows_of_every_kind_are_valid(changes: dict[str, Any]) -> None:
    row = measurement(**changes)
    assert Measurement.from_line(row.line()) == row


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": "fine"}, "status='fine' must be one of: passed, wrong"),
        ({"kind": "guessed"}, "kind='guessed' must be one of: measured, predicted"),
        ({"median_us": None}, "median_us must be given: status is passed"),
        ({**FAILED, "median_us": 3.0}, "median_us must be null: status is timeout"),
        ({**PREDICTED, "samples": 5}, "ci_us and samples must be null and 0: kind is predicted"),
        ({"ci_us": None}, "ci_us and samples must be given"),
        ({"samples": 0}, "ci_us and samples must be given"),
        ({"median_us": 181}, "median_us=181.0 lies outside ci_us=[179.5, 180.5]"),
        ({"ci_us": [181.0, 179.0]}, "lies outside"),
        ({"ci_us": [179.0]}, "ci_us=[179.0] must be [low, high]"),
        ({"ci_us": [None, 181.0]}, "must be [low, high]"),
        ({"median_us": float("nan")}, "median_us=nan is out of range"),
        ({"max_error": float("inf")}, "max_error=inf is out of range"),
        ({"sqnr_db": float("nan")}, "sqnr_db=nan is out of range"),
        ({"quantiles_us": []}, "quantiles_us=[] must be 1 to 32 ascending numbers"),
        ({"quantiles_us": [1.0] * 33}, "must be 1 to 32 ascending numbers"),
        ({"quantiles_us": [2.0, 1.0]}, "quantiles_us=[2.0, 1.0] must ascend"),
        ({"quantiles_us": [1.0, None]}, "must be 1 to 32 ascending numbers"),
        ({"quantiles_us": [float("nan")]}, "quantiles_us=nan is out of range"),
        ({**PREDICTED, "quantiles_us": [1.0]}, "quantiles_us must be null: nothing was timed"),
        ({"median_us": -1.0}, "out of range"),
        ({"median_us": "180"}, "median_us='180' must be a number or null"),
        ({"power_w": True}, "power_w=True must be a number or null"),
        ({"samples": 1.5}, "samples=1.5 must be a whole number"),
        ({"entry": "gemm; rm -rf"}, "entry='gemm; rm -rf' must be a word"),
        ({"gpu": ""}, "gpu='' must be a word"),
        ({"problem": []}, "problem must be an object"),
        ({"problem": {"M": [1]}}, "problem.M=[1] must be a number, text or boolean"),
        ({"config": {"BLOCK_M": 1 << 70}}, "config.BLOCK_M="),
        ({"config": {"a b": 1}}, "'a b' cannot be a key of config"),
        ({"config": {f"p{i}": i for i in range(99)}}, "object of up to 64 members"),
        ({"environment": "h200"}, "environment must be an object"),
        ({"protocol": {"regime": "graph"}}, "exactly the keys regime, l2 and state"),
        ({"protocol": ROW["protocol"] | {"regime": "warm"}}, "must be one of: graph, eager"),
        ({"created_at": "yesterday"}, "created_at='yesterday' must be an ISO 8601 time"),
        ({"created_at": "2026-11-20T09:30:12"}, "must name a time zone"),
        ({"colour": "red"}, "unknown key 'colour'"),
    ],
)
def test_an_invalid_row_is_a_one_line_error(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        measurement(**changes)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ROW, ids="without-{}".format)
def test_every_key_is_needed(key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"the key '{key}' is missing"):
        Measurement.from_json({name: value for name, value in ROW.items() if name != key})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON: Expecting property name"),
        ("[1]", "must be a JSON object, not list"),
        ('{"entry": NaN}', "not JSON: NaN is not a number"),
        ('{"entry": 1, "entry": 2}', "not JSON: a key occurs twice"),
        ("[" * 50_000, "not JSON: nested too deeply"),
        (b'{"entry": "\xff"}', "not JSON: the text is not UTF-8"),
        ('{"samples": ' + "9" * 5000 + "}", "not JSON"),
        (" " * (LINE_BYTES + 1), "longer than 65536 bytes"),
    ],
)
def test_lines_that_are_no_records_are_refused(line: str | bytes, reason: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Measurement.from_line(line)
    assert reason in str(caught.value) and str(caught.value).count("not JSON") <= 1


def test_a_record_too_long_to_export_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="longer than"):
        _ = measurement(environment={"notes": "x" * LINE_BYTES}).digest


def test_times_are_kept_in_utc_so_that_they_sort() -> None:
    row = measurement(created_at="2026-11-20T10:30:12+01:00")
    assert row.created_at == ROW["created_at"]
    assert now() > row.created_at


def test_keys_are_those_of_problem_and_config() -> None:
    row = measurement()
    assert row.problem_key == Problem.of("gemm", **ROW["problem"]).key == row.to_problem().key
    assert row.config_key == Config(ROW["config"]).key == row.to_config().key


def test_equal_content_has_one_digest() -> None:
    shuffled = dict(reversed(ROW.items())) | {"median_us": 180}
    assert Measurement.from_json(shuffled).digest == measurement().digest
    assert measurement(run="other").digest != measurement().digest


def test_every_run_has_a_new_name() -> None:
    assert new_run() != new_run()
    measurement(run=new_run())
