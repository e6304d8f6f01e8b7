"""Records of machine code when only some cases of an implementation have other code."""

from __future__ import annotations

from dataclasses import replace

from store_rows import measurement

from kernelcat import catalog
from kernelcat.catalog.digest import digest
from kernelcat.catalog.implementation import Config
from kernelcat.runtime.gpu import find
from kernelcat.store.measurement import Measurement
from kernelcat.verify.carry import Comparison, uncarried
from kernelcat.verify.code_record import DIFFERENT, NOT_COMPARED, RAN, Case, Record
from kernelcat.verify.receipts import Receipt
from kernelcat.verify.recorder import missing

IMPLEMENTATION = catalog.implementation("attn_merge", "cuda", "vectorized")
NAME, TODAY = IMPLEMENTATION.name, digest(IMPLEMENTATION)
PROBLEMS = catalog.entry("attn_merge").problems
FIRST, SECOND, THIRD = list(PROBLEMS)[:3]
NVRTC = {"nvrtc": "13.0.88"}
RECEIPT = Receipt(
    NAME, TODAY, "h200", {"compilers": NVRTC}, (FIRST, SECOND), 100, {}, "2026-11-23T00:00:00+00:00"
)


def case(problem: str) -> Case:
    return Case(PROBLEMS[problem], IMPLEMENTATION.default(PROBLEMS[problem], find("h200")))


OLD = Record(NAME, "h200", NVRTC, {"old": RAN}, "old", ()).with_cases(
    {case(FIRST): "launch.one", case(SECOND): "launch.two"}, "old"
)
NEW = replace(OLD, digests={"old": RAN, "new": RAN}, checked="new")
COMPLETE = replace(OLD, digests={TODAY: RAN}, checked=TODAY)
"""Has all that ``RECEIPT`` proves."""


def measured(problem: str, gpu: str) -> Measurement:
    """A row of today's code."""
    chosen = case(problem)
    return measurement(
        entry=IMPLEMENTATION.entry, language="cuda", variant=IMPLEMENTATION.variant,
        problem=chosen.problem.values, problem_name=problem, config=chosen.config,
        source=TODAY, gpu=gpu, environment={"compilers": NVRTC},
    )  # fmt: skip


def predicted(problem: str, gpu: str) -> Measurement:
    """A prediction of today's code."""
    nothing = dict.fromkeys(("ci_us", "sm_clock_mhz", "power_w", "temperature_c", "max_error"))
    return replace(measured(problem, gpu), kind="predicted", samples=0, **nothing)


def test_a_case_with_other_code_voids_the_receipt_and_its_own_measurements_alone() -> None:
    codes = {case(FIRST): "launch.one", case(SECOND): "launch.other"}
    record = Record.from_json(NEW.with_cases(codes, "new").to_json())
    assert record.exceptions == {"old": {case(SECOND).key: DIFFERENT}}
    assert not record.runs_same_code("old", "new", None)
    assert record.runs_same_code("old", "new", case(FIRST))
    assert not record.runs_same_code("old", "new", case(SECOND))


def test_a_case_that_does_not_compile_any_more_is_dropped() -> None:
    record = NEW.with_cases({case(FIRST): "launch.one", case(SECOND): "!no"}, "new")
    assert record.code(case(SECOND)) is None
    assert not record.runs_same_code("old", "new", None)
    assert not record.runs_same_code("old", "new", case(SECOND))


def test_a_case_that_is_added_was_never_compared_with_earlier_sources() -> None:
    record = NEW.with_cases({case(THIRD): "launch.three"}, "new")
    assert record.exceptions == {"old": {case(THIRD).key: NOT_COMPARED}}
    assert record.runs_same_code("old", "new", None)
    assert record.runs_same_code("old", "new", case(FIRST))
    assert not record.runs_same_code("old", "new", case(THIRD))


def test_after_a_source_comes_back_cases_that_joined_since_then_are_compared() -> None:
    returned = replace(OLD, digests={TODAY: RAN, "between": RAN}, checked=TODAY)
    assert uncarried([returned]) == []
    joined = returned.with_cases({case(THIRD): "launch.three"}, "between")
    assert uncarried([joined]) == [joined]
    carried = Comparison(joined, TODAY, compared=3).carried()
    assert carried.digests == joined.digests and uncarried([carried]) == []
    assert carried.runs_same_code("between", TODAY, case(THIRD))


def test_an_exception_stays_when_more_is_recorded() -> None:
    first = NEW.with_cases({case(SECOND): "launch.other"}, "new")
    second = first.with_cases({case(SECOND): "launch.two"}, "new")
    assert not second.runs_same_code("old", "new", case(SECOND))


def test_a_newer_receipt_builds_every_known_case_again() -> None:
    ((record, cases),) = missing([RECEIPT], [], [OLD])
    assert record.digests == {"old": RAN, TODAY: RAN}
    assert set(cases) == {case(FIRST), case(SECOND)}
    complete = record.with_cases(dict(OLD.codes()), TODAY)
    assert missing([RECEIPT], [], [complete]) == []


def test_a_gpu_without_a_receipt_has_a_record_of_what_was_measured_there() -> None:
    row = measured(FIRST, "h100")
    ((record, cases),) = missing([RECEIPT], [row, predicted(FIRST, "h100")], [COMPLETE])
    assert (record.key, record.digests) == (("h100", NAME), {TODAY: RAN})
    assert cases == [case(FIRST)] and record.toolchain == NVRTC
    recorded = record.with_cases({case(FIRST): "launch.one"}, TODAY)
    assert missing([RECEIPT], [row], [COMPLETE, recorded]) == []
    ((_, more),) = missing([RECEIPT], [row, measured(SECOND, "h100")], [COMPLETE, recorded])
    assert more == [case(SECOND)]


def test_a_receipt_of_older_sources_hides_no_measurement_of_todays() -> None:
    older, row = replace(RECEIPT, gpu="h100", source="gone"), measured(FIRST, "h100")
    ((record, cases),) = missing([older, RECEIPT], [row], [COMPLETE])
    assert (record.key, cases) == (("h100", NAME), [case(FIRST)])


def test_predictions_and_old_rows_begin_no_record() -> None:
    assert missing([RECEIPT], [predicted(FIRST, "b200")], [COMPLETE]) == []
    assert missing([RECEIPT], [replace(measured(FIRST, "h100"), source="gone")], [COMPLETE]) == []


def test_codes_of_other_compilers_are_not_compared() -> None:
    ((record, _),) = missing([RECEIPT], [], [replace(OLD, toolchain={"nvrtc": "12.9"})])
    assert record.digests == {TODAY: RAN} and record.toolchain == NVRTC


def test_what_ran_before_cannot_be_recorded_any_more() -> None:
    assert missing([replace(RECEIPT, source="gone")], [], [OLD]) == []


def test_configurations_count_in_the_key_of_a_case() -> None:
    problem, config = case(FIRST)
    assert case(FIRST).key != Case(problem, Config(config, unroll=8)).key
