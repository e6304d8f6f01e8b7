"""The index of techniques: every link is followed, and every number comes from committed rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kernelcat import catalog
from kernelcat.catalog.implementation import Implementation
from kernelcat.cli import main
from kernelcat.report import show
from kernelcat.report.techniques import index, measured, page, text
from kernelcat.report.techniques.code import ATTRIBUTES, Instruction, Launch, ran
from kernelcat.report.techniques.evidence import COMPILED, LEVELS, MEASURED, Evidence, Test, plain
from kernelcat.report.techniques.measured import SLOWER, Counted, Effect, Kept, Reached
from kernelcat.report.techniques.technique import DOES_NOT_APPLY, NOT_YET, Technique, slug, tally
from kernelcat.runtime import gpu
from kernelcat.store import shipped

ROOT = Path(__file__).parent.parent
VOCABULARY = (ROOT / "tests" / "techniques.txt").read_text().splitlines()
"""Names that people look for, as textbooks and release notes have them."""

BUILT_ON = ("h200", "b200")
"""GPUs for which unclaimed instructions are looked for, the first that an implementation serves."""

GAIN = Effect("gemm", "4096x4096x4096", "cuda/tma", "cuda/naive", state="ladder")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["techniques", *arguments])


# ---- the records ---------------------------------------------------------------------------------


@pytest.mark.parametrize("technique", index.every(), ids=lambda each: each.slug)
def test_what_a_record_says_holds(technique: Technique) -> None:
    assert not technique.faults(ROOT)


def test_at_least_90_techniques_have_evidence_that_ran() -> None:
    covered = [each for each in index.every() if each.is_covered]
    assert len(covered) >= 90
    for each in covered:
        assert any(evidence.level != COMPILED for evidence in each.evidence)


def test_every_name_of_the_vocabulary_is_answered() -> None:
    assert len(VOCABULARY) > 140
    for name in VOCABULARY:
        index.find(name)


def test_names_and_anchors_are_unique() -> None:
    anchors = [each.slug for each in index.every()] + [group.slug for group in index.GROUPS]
    assert len(anchors) == len(set(anchors))
    for each in index.every():
        for name in (each.name, *each.aliases):
            assert index.find(name)[0] is each, name


def test_people_write_no_measured_number() -> None:
    """Times and ratios change with the next tune; what is written by hand would stay."""
    number = re.compile(r"\d\s?(×|%|µs|us\b|ms\b|x\b(?!\d))|\d\.\d+ times")
    for each in index.every():
        written = f"{each.explanation} {each.not_yet} {each.does_not_apply}"
        assert not number.search(written), each.name


def test_records_have_an_explanation_and_a_source() -> None:
    for each in index.every():
        assert each.source and not each.source.endswith("."), each.name
        assert each.explanation.endswith("."), each.name
        assert "|" not in each.explanation + each.name, each.name


UNCLAIMED = [
    (name, evidence.pattern)
    for each in index.every()
    for evidence in each.evidence
    if isinstance(evidence, Instruction)
    for name in evidence.unclaimed
]


def implementations(sku: str) -> list[Implementation]:
    """Implementations with unclaimed instructions for which ``sku`` is the GPU to build for."""
    chosen = []
    for name in dict.fromkeys(name for name, _ in UNCLAIMED):
        each = catalog.implementation(*name.split("/"))
        served = [gpu.find(known) for known in BUILT_ON if each.serves(gpu.find(known).arch)]
        chosen += [each] if served[0].sku == sku else []
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("sku", BUILT_ON)
def test_instructions_that_no_implementation_claims_are_in_the_machine_code(sku: str) -> None:
    for report in show.machine_codes(implementations(sku), gpu.find(sku)):
        opcodes = [opcode for step in report["steps"] for opcode in step["opcodes"]]
        for name, pattern in UNCLAIMED:
            if name == report["implementation"]:
                regex = pattern.replace(".", r"\.").replace("*", ".*")
                assert any(re.match(regex, opcode) for opcode in opcodes), (name, pattern)


# ---- evidence ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "fault"),
    [
        (Test("tests/test_nothing.py::test_x"), "no file tests/test_nothing.py"),
        (Test("tests/test_gemm_nowhere.py::test_x"), "no file"),
        (Test("tests/test_techniques.py::test_that_is_not_there"), "has no test"),
        (Instruction("HGMMX"), "no implementation claims HGMMX"),
        (Instruction("HGMMA", ("gemm/cute/wgmma", "attn_merge/cuda/gone")), "no cuda variant"),
        (Launch("gemm/cuda/naive", "4096x4096x4096", "swizzle"), "has no swizzle"),
        (Launch("gemm/cuda/gone", "4096x4096x4096", "swizzle"), "has no cuda variant"),
        (Launch("gemm/cuda/wgmma", "4096x4096x4097", "swizzle"), "has no problem"),
        (Launch("gemm/cuda/naive", "8192x201088x2880", "few launches"), "is not recorded"),
        (replace(GAIN, other="cuda/gone"), "never raced"),
        (replace(GAIN, problem="1x1x1"), "never raced"),
        (replace(GAIN, outcome=SLOWER), "is faster"),
        (replace(GAIN, this=GAIN.other, other=GAIN.this), "is slower"),
        (replace(GAIN, other=GAIN.this), "is a tie"),
        (
            Effect("nvfp4_matmul", "1x7168x18432-tiles", "", "", other_problem="1x7168x18432"),
            "two runs",
        ),
        (Reached("gemm", "8192x8192x8192", "cuda/wgmma", 0.99), "of the roof"),
        (Reached("gemm", "8192x8192x8192", "cuda/gone", 0.1), "never raced"),
        (Kept("gemm/cuda/wgmma", "swap", (7,)), "no value 7"),
        (Kept("gemm/cuda/wgmma", "swapped", (True,)), "no value True"),
        (Kept("gemm/cuda/wgmma", "swap", (True, False)), "no other values"),
        (Kept("gemm/cuda/wgmma", "split_k", (16,)), "never kept"),
        (
            Counted("multicast_gemm", "4096x4096x4096", "cute/unicast", "cute/multicast",
                    "l2_read_bytes"),
            "bytes",
        ),
        (Counted("gemm", "4096x4096x4096", "cuda/wgmma", "cuda/tma", "l2_bytes"), "no profile"),
    ],
    ids=str,
)  # fmt: skip
def test_evidence_that_does_not_hold_is_a_fault(evidence: Evidence, fault: str) -> None:
    assert any(fault in each for each in evidence.faults()), evidence.faults()


def test_a_record_with_a_wrong_path_or_without_reason_is_a_fault() -> None:
    record = Technique("name", "What it is.", "source")
    assert record.state == NOT_YET
    assert record.faults(ROOT) == ["name: neither evidence nor a reason"]
    assert not replace(record, not_yet="a reason").faults(ROOT)
    wrong = replace(record, not_yet="a reason", modules=("kernelcat/gone.py",))
    assert wrong.faults(ROOT) == ["name: there is no file kernelcat/gone.py"]
    both = replace(record, does_not_apply="a reason", evidence=(GAIN,))
    assert both.state == DOES_NOT_APPLY
    assert both.faults(ROOT) == ["name: what does not apply has evidence"]


def test_the_strongest_evidence_is_the_state_and_code_that_never_ran_does_not_cover() -> None:
    test = Test("tests/test_techniques.py::test_names_and_anchors_are_unique")
    compiled = Instruction("UTCOMMA", ("nvfp4_matmul/cute/block_scaled",))
    record = Technique("name", "What it is.", "source", (compiled,))
    assert (record.state, record.is_covered) == (COMPILED, False)
    assert replace(record, evidence=(compiled, test)).is_covered
    assert replace(record, evidence=(compiled, test, GAIN)).state == MEASURED
    assert sum(tally([record]).values()) == 1 and tally([record])[COMPILED] == 1


def test_an_instruction_names_what_ran_apart_from_what_has_no_record() -> None:
    evidence = Instruction("UTMALDG*MULTICAST")
    assert ran("multicast_gemm/cuda/multicast") and not ran("multicast_gemm/triton/multicast")
    line = evidence.text(plain)
    assert line.index("cuda/multicast") < line.index("ran on an NVIDIA H200")
    assert line.index("ran on") < line.index("triton/multicast") < line.index("no record")


def rows_of_gain() -> Iterator[float]:
    """The medians of :data:`GAIN`, found without the code under test."""
    problem = catalog.entry("gemm").problems[GAIN.problem].key
    for variant in ("tma", "naive"):
        (found,) = [
            row.median_us
            for row in shipped()
            if (row.entry, row.state, row.problem_key, row.language, row.variant)
            == ("gemm", "ladder", problem, "cuda", variant)
        ]
        yield found


def test_a_ratio_is_that_of_the_committed_rows() -> None:
    fast, slow = rows_of_gain()
    assert GAIN.ratio == slow / fast
    assert f"a ratio of {slow / fast:,.0f}" in GAIN.text(plain)
    assert GAIN.data()["us"] == [fast, slow]


def test_numbers_follow_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = GAIN.text(plain)
    slow = {"median_us": 2e6, "ci_us": (2e6, 2e6)}
    races = tuple(
        replace(race, rows=tuple(
            replace(r, **slow) if (r.language, r.variant) == ("cuda", "tma") else r
            for r in race.rows
        ))
        for race in measured._races()
    )  # fmt: skip
    monkeypatch.setattr(measured, "_races", lambda: races)
    assert GAIN.text(plain) != before
    assert GAIN.faults() == ["gemm 4096x4096x4096: 0.14 is slower"]


def test_how_often_a_value_was_kept_is_counted_in_the_committed_rows() -> None:
    rows = {}
    for row in sorted(shipped(), key=lambda row: row.created_at):
        if (row.gpu, row.entry, row.language, row.variant) == ("h200", "gemm", "cuda", "wgmma"):
            rows[row.problem_key, row.regime, row.state] = row
    raced = [
        row.config["swap"]
        for (_, regime, state), row in rows.items()
        if regime == "graph" and state in ("burst", "sustained")
    ]
    evidence = Kept("gemm/cuda/wgmma", "swap", (True,))
    assert evidence.count() == (sum(raced), len(raced))
    assert f"in {sum(raced)} of {len(raced)} races" in evidence.text(plain)


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_each_attribute_is_told_from_its_absence(attribute: str) -> None:
    program = catalog.implementation("gemm", "cuda", "naive")
    problem = catalog.entry("gemm").named("4096x4096x4096")
    target = gpu.find("h200")
    empty = replace(program.program(problem, program.default(problem, target), target), steps=())
    assert not ATTRIBUTES[attribute](replace(empty, workspaces={}))


# ---- what people see -----------------------------------------------------------------------------


def test_the_command_lists_every_technique_and_its_group() -> None:
    listed = json.loads(run("--json").output)
    assert [each["name"] for each in listed] == [each.name for each in index.every()]
    assert {each["state"] for each in listed} <= {*LEVELS, NOT_YET, DOES_NOT_APPLY}
    table = run().output
    assert all(each.name in table for each in index.every())
    only = json.loads(run("--group", "matrix-products", "--json").output)
    assert only == [each for each in listed if each["group"] == "Matrix products"]


@pytest.mark.parametrize("technique", index.every(), ids=lambda each: each.slug)
def test_the_command_explains_each_technique(technique: Technique) -> None:
    shown = json.loads(run(technique.name, "--json").output)
    assert shown["name"] == technique.name
    assert [each["text"] for each in shown["evidence"]] == [
        each.text(plain) for each in technique.evidence
    ]
    lines = text.detail(*index.find(technique.name)).splitlines()
    assert lines[0].startswith(technique.name)
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tma-multcast",), "unknown technique 'tma-multcast'; did you mean tma-multicast"),
        (("swizzled",), "did you mean swizzled-shared-memory-128-byte"),
        (("xyzzy",), "kernelcat techniques lists all"),
        (("--group", "attention"), "did you mean"),
        (("--group", "foundation"), "did you mean foundations"),
    ],
)
def test_a_misspelt_name_gets_suggestions_in_one_line(
    arguments: tuple[str, ...], message: str
) -> None:
    done = run(*arguments)
    assert done.exit_code == 1 and message in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["PDL", "programmatic dependent launch", "split-k", "GQA", "mqa"])
def test_abbreviations_and_parts_of_names_are_found(name: str) -> None:
    assert run(name).exit_code == 0


def test_the_page_explains_every_technique_and_counts_them() -> None:
    made = page.markdown()
    for each in index.every():
        heading = each.name.replace("_", "\\_")  # else Markdown makes __name__ bold
        assert f"\n### {heading}\n" in made
        assert each.explanation in made
    covered = sum(each.is_covered for each in index.every())
    assert f"covered: {covered} of {len(index.every())}." in made


def test_anchors_are_those_of_github() -> None:
    assert slug("FP8 E4M3/E5M2 formats") == "fp8-e4m3e5m2-formats"
    assert slug("__launch_bounds__") == "__launch_bounds__"
    assert slug("cp.async / memcpy_async") == "cpasync--memcpy_async"
