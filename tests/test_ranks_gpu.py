"""Several ranks on real GPUs: two that share one GPU, and one a GPU where there are several."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kernelcat import catalog
from kernelcat.ranks import check, race, sanitize
from kernelcat.runtime import driver
from kernelcat.verify.sanitizer import sanitizer_path

FAULT = Path(__file__).parent / "ranks_fault.py"
ENTRY = catalog.entry("all_reduce")
VARIANTS = ("one_shot", "two_shot", "ll", "slots")
ANSWER_S = 10.0
"""Seconds in which ranks answer after another one has failed."""

pytestmark = pytest.mark.gpu


def started(fault: str, folder: Path, ranks: int = 2) -> list[subprocess.Popen[str]]:
    """Ranks that share the GPUs of this machine, the last of them with a fault."""
    count = driver.count()
    return [
        subprocess.Popen(
            [sys.executable, FAULT, *map(str, (rank, ranks, rank % count)), folder / "s", fault],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "problem",
    ["1x2880", "128x7168", "tokens=3,hidden=1000,ranks=2,dtype=float16",
     "tokens=700,hidden=7168,ranks=2", "tokens=5,hidden=808,ranks=3"],
)  # fmt: skip
@pytest.mark.parametrize("gpus", [1, "all"])
def test_every_variant_is_right_on_every_rank(variant: str, problem: str, gpus: int | str) -> None:
    count = driver.count() if gpus == "all" else 1
    if gpus == "all" and count == 1:
        pytest.skip("needs several GPUs")
    implementation = catalog.implementation("all_reduce", "cuda", variant)
    (checked,) = check.run([implementation], [problem], range(count))
    assert not checked.outcome.failures
    assert checked.outcome.problems or checked.outcome.skipped


@pytest.mark.parametrize(
    ("entry", "language", "variant"),
    [("moe_dispatch", "cuda", "ll"), ("moe_dispatch", "cuda", "tiles"),
     ("moe_combine", "cuda", "ll"), ("moe_combine", "cuda", "tiles"),
     ("kv_transfer", "cuda", "vectors"), ("kv_transfer", "triton", "words")],
)  # fmt: skip
def test_random_exchanges_are_right_on_every_rank(entry: str, language: str, variant: str) -> None:
    implementation = catalog.implementation(entry, language, variant)
    fuzzing = check.Fuzzing(40, kernels=4)
    (checked,) = check.run_fuzzing([implementation], range(min(driver.count(), 2)), fuzzing)
    assert not checked.outcome.failures
    assert checked.outcome.fuzz_examples == 40


@pytest.mark.skipif(sanitizer_path() is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", sanitize.TOOLS)
@pytest.mark.parametrize(
    ("entry", "variant"),
    [("all_reduce", "ll"), ("moe_combine", "tiles"), ("kv_transfer", "vectors")],
)
def test_tools_know_the_memory_of_ranks_that_share_a_gpu(
    entry: str, variant: str, tool: str
) -> None:
    implementation = catalog.implementation(entry, "cuda", variant)
    sanitizing = check.Sanitizing(2, (tool,))
    problem = next(iter(catalog.entry(entry).problems))
    (checked,) = check.run([implementation], [problem], [0], None, sanitizing)
    assert not checked.outcome.failures
    assert checked.outcome.sanitizer == {tool: 0}, checked.outcome.findings


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("none", "right"),
        ("late", "right"),
        ("dies", "rank 1 did not answer a kernel of rank 0 in time"),
        ("hangs", "rank 1 did not answer a kernel of rank 0 in time"),
        ("shape", "rank 1 loads all_reduce/cuda/ll"),
    ],
)
def test_the_others_answer_in_time(fault: str, expected: str, tmp_path: Path) -> None:
    first, last = started(fault, tmp_path)
    begin = None
    if fault == "dies":
        last.wait(timeout=120)
        begin = time.monotonic()
    line, _ = first.communicate(timeout=120)
    if begin is not None:
        assert time.monotonic() - begin < ANSWER_S
    last.kill()
    last.wait()
    assert line.startswith(expected)


def test_a_race_has_a_row_for_each_variant() -> None:
    implementations = catalog.implementations("all_reduce")
    raced = race.run(implementations, ENTRY.named("1x2880"), range(driver.count()))
    assert {each.variant for each in raced.times} >= set(VARIANTS)
    json.dumps(raced.rows())
