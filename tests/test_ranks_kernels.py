"""Kernels of several ranks on the CPU: processes that share windows, and launches in any order.

Instructions and memory order are not tested here, but places in windows, rings, epochs and signals.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_fibers
import pytest

from kernelcat.ranks.window import WINDOW_BYTES

pytestmark = pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")
HERE = Path(__file__).parent

LL = {"threads": 128, "blocks": 8}
TILES = {"unroll": 1, "blocks": 16}
LAUNCHES = [
    ["ll", {"tokens": 1, "hidden": 40}, LL],
    ["ll", {"tokens": 3, "hidden": 2880}, LL],
    ["one_shot", {"tokens": 1, "hidden": 40}, TILES],
    ["two_shot", {"tokens": 1, "hidden": 40}, TILES],
    ["ll", {"tokens": 1, "hidden": 40}, LL],
    ["one_shot", {"tokens": 130, "hidden": 2880}, TILES],
    ["two_shot", {"tokens": 130, "hidden": 2880}, TILES],
    ["ll", {"tokens": 3, "hidden": 2880}, LL],
    ["one_shot", {"tokens": 1, "hidden": 40}, TILES],
]
"""Grids of different sizes after each other; tiles of 4096 elements, of which a large problem has
six for each of 16 thread blocks."""


def results(folder: Path, ranks: int, launches: list[list[object]]) -> list[list[str]]:
    """What was wrong on each rank."""
    for rank in range(ranks):
        with (folder / str(rank)).open("wb") as file:
            file.truncate(WINDOW_BYTES)
    started = [
        subprocess.Popen(
            [sys.executable, HERE / "ranks_host.py", str(rank), str(ranks), folder,
             json.dumps(launches)],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    return [json.loads(each.communicate(timeout=300)[0]) for each in started]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_launch_is_right_on_every_rank(ranks: int, tmp_path: Path) -> None:
    assert results(tmp_path, ranks, LAUNCHES) == [[]] * ranks


@pytest.mark.parametrize(("variant", "config"), [("ll", LL), ("one_shot", TILES)])
def test_a_missing_rank_is_named_and_later_launches_return(
    variant: str, config: dict[str, int], tmp_path: Path
) -> None:
    small = {"tokens": 1, "hidden": 40}
    launches = [[variant, {**small, "absent": 1}, config], ["two_shot", small, TILES]]
    first, _ = results(tmp_path, 2, [[v, {**a, "absent": 1}, c] for v, a, c in launches])
    assert first == ["rank 1 is missing"] * 2


def on_machine(folder: Path, ranks: int, job: dict[str, object]) -> list[Any]:
    """What each rank of a job prints."""
    started = [
        subprocess.Popen(
            [sys.executable, HERE / "ranks_machine.py", str(rank), str(ranks), folder / "socket",
             json.dumps(job)],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    return [json.loads(each.communicate(timeout=300)[0]) for each in started]


def axes(**changes: int) -> dict[str, object]:
    return {"tokens": 1, "hidden": 2880, "ranks": 2, "dtype": "bfloat16", **changes}


CHECK = {
    "verb": "check",
    "implementation": ["all_reduce", "cuda", "two_shot"],
    "problems": [axes(), axes(hidden=4)],
    "seeds": [1, 2],
}


def test_a_check_judges_runs_and_graphs_on_every_rank(tmp_path: Path) -> None:
    for verdicts in on_machine(tmp_path, 2, CHECK):
        assert [verdict.keys() for verdict in verdicts] == [{"config"}, {"config", "skipped"}]


def test_a_check_finds_a_rank_with_other_inputs(tmp_path: Path) -> None:
    results = on_machine(tmp_path, 2, {**CHECK, "last": {"seeds": [1, 3]}})
    for verdicts in results:
        assert verdicts[0]["wrong"].startswith("seed")


def test_ranks_with_different_problems_are_told(tmp_path: Path) -> None:
    job = {**CHECK, "last": {"problems": [axes(tokens=2)]}}
    for error in on_machine(tmp_path, 2, job):
        assert error.startswith("rank 1 loads all_reduce/cuda/two_shot")
        assert "but rank 0 loads" in error


def test_a_race_has_a_row_for_each_variant(tmp_path: Path) -> None:
    job = {"verb": "race", "entry": "all_reduce", "problem": axes(), "seed": 1}
    first, second = on_machine(tmp_path, 2, job)
    assert first == second
    *rows, left_out = first
    assert {row["contestant"].rpartition("/")[2] for row in rows} == {"ll", "one_shot", "two_shot"}
    assert all(row["ci_us"][0] <= row["median_us"] <= row["ci_us"][1] for row in rows)
    assert {row["topology"] for row in first} == {"h200x1-shared"}
    assert left_out["left_out"] == "NCCL and torch need a GPU for each rank"
