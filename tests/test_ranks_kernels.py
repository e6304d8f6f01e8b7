"""Kernels of several ranks on the CPU: processes that share windows, and launches in any order.

Instructions and memory order are not tested here, but places in windows, rings, epochs and signals.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_fibers
import pytest

from kernelcat import catalog
from kernelcat.ranks.window import WINDOW_BYTES
from kernelcat.reference.all_reduce import summed
from kernelcat.runtime import children

pytestmark = pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")
HERE = Path(__file__).parent

LL = {"threads": 128, "blocks": 8}
TILES = {"unroll": 1, "blocks": 16}
FUSED = {"norm": True, "residual": True, "eps": 1e-6}
SUMS = [
    ["all_reduce", "ll", {"tokens": 1, "hidden": 40}, LL],
    ["all_reduce", "ll", {"tokens": 3, "hidden": 2880}, LL],
    ["all_reduce", "one_shot", {"tokens": 1, "hidden": 40}, TILES],
    ["all_reduce", "two_shot", {"tokens": 1, "hidden": 40}, TILES],
    ["all_reduce", "ll", {"tokens": 1, "hidden": 40}, LL],
    ["all_reduce", "one_shot", {"tokens": 130, "hidden": 2880}, TILES],
    ["all_reduce", "two_shot", {"tokens": 130, "hidden": 2880}, TILES],
    ["all_reduce", "ll", {"tokens": 3, "hidden": 2880}, LL],
    ["all_reduce", "one_shot", {"tokens": 1, "hidden": 40}, TILES],
    ["all_reduce", "slots", {"tokens": 3, "hidden": 2880}, {"blocks": 64}],
    ["all_reduce", "slots", {"tokens": 70, "hidden": 48, "residual": True}, {"blocks": 64}],
    ["all_reduce", "slots", {"tokens": 5, "hidden": 4104, "norm": True}, {"blocks": 64}],
    ["all_reduce", "slots", {"tokens": 2, "hidden": 40, **FUSED}, {"blocks": 64}],
]
TRITON = {"block": 512, "programs": 64, "warps": 4}
TRITON_SUMS = [
    ["all_reduce", "triton/slots", {"tokens": 1, "hidden": 40}, TRITON],
    ["all_reduce", "ll", {"tokens": 1, "hidden": 40}, LL],
    ["all_reduce", "triton/slots", {"tokens": 3, "hidden": 1366, "dtype": "float16"}, TRITON],
    ["all_reduce", "slots", {"tokens": 3, "hidden": 2880}, {"blocks": 64}],
    ["all_reduce", "triton/slots", {"tokens": 25, "hidden": 2880}, TRITON],
    ["all_reduce", "triton/slots", {"tokens": 2, "hidden": 200, **FUSED}, TRITON],
]
"""The kernels of both languages on the same windows; more words than a round of programs takes."""

"""Grids of different sizes after each other; tiles of 4096 elements, of which a large problem has
six for each of 16 thread blocks."""

SLOTS, RINGS = {"blocks": 64}, {"tile_tokens": 2, "blocks": 32}
ROUTED = {"hidden": 288, "top_k": 3, "local_experts": 4}
WIDE = {**ROUTED, "act_dtype": "bfloat16"}
NARROW = {**WIDE, "hidden": 16}
FLOAT8 = {**ROUTED, "act_dtype": "float8_e4m3fn", "batch": "uneven"}
DISPATCHES = [
    ["moe_dispatch", "ll", {**WIDE, "tokens": 5}, SLOTS],
    ["moe_dispatch", "ll", {**FLOAT8, "tokens": 70}, SLOTS],
    ["moe_dispatch", "tiles", {**FLOAT8, "tokens": 5}, RINGS],
    ["moe_dispatch", "ll", {**WIDE, "tokens": 0}, SLOTS],
    ["moe_dispatch", "ll", {**WIDE, "tokens": 5}, SLOTS],
    ["moe_dispatch", "tiles", {**FLOAT8, "tokens": 470, "hidden": 32}, RINGS],
    ["moe_dispatch", "ll", {**NARROW, "tokens": 300, "skew": "zipf"}, SLOTS],
    ["moe_dispatch", "ll", {**NARROW, "tokens": 150, "repeated": True}, SLOTS],
    ["moe_dispatch", "tiles", {**WIDE, "tokens": 9, "top_k": 7}, RINGS],
    ["moe_dispatch", "ll", {**NARROW, "tokens": 700, "local_experts": 7}, SLOTS],
    ["moe_dispatch", "tiles", {**NARROW, "tokens": 700, "repeated": True}, RINGS],
    ["moe_dispatch", "ll", {**NARROW, "tokens": 6, "local_experts": 301}, SLOTS],
]
"""More tokens than threads, and than thread blocks; eight tiles for each of 32 thread blocks; more
tokens than one thread block counts, and several that count and send ids; tokens that have an expert
twice; more experts than threads."""

COMBINES = [
    ["moe_combine", "ll", {**ROUTED, "tokens": 5}, SLOTS],
    ["moe_combine", "ll", {**ROUTED, "tokens": 70, "residual": True, "batch": "uneven"}, SLOTS],
    ["moe_combine", "tiles", {**ROUTED, "tokens": 5}, RINGS],
    ["moe_combine", "ll", {**ROUTED, "tokens": 0}, SLOTS],
    ["moe_combine", "ll", {**ROUTED, "tokens": 70, "skew": "hot", "top_k": 1}, SLOTS],
    ["moe_combine", "tiles", {**ROUTED, "tokens": 470, "hidden": 32, "residual": True}, RINGS],
    ["moe_combine", "ll", {**ROUTED, "tokens": 5}, SLOTS],
]
"""With "hot" and one expert a token, all tokens come to rank 0 and none to the others."""


TRITON_EXPERTS = [
    ["moe_dispatch", "triton/slots", {**WIDE, "tokens": 5}, TRITON],
    ["moe_dispatch", "ll", {**WIDE, "tokens": 5}, SLOTS],
    ["moe_dispatch", "triton/slots", {**FLOAT8, "tokens": 9, "hidden": 2576}, TRITON],
    ["moe_combine", "triton/slots", {**ROUTED, "tokens": 5}, TRITON],
    ["moe_dispatch", "triton/slots", {**WIDE, "tokens": 0}, TRITON],
    ["moe_combine", "triton/slots", {**ROUTED, "tokens": 0}, TRITON],
    ["moe_dispatch", "triton/slots", {**WIDE, "tokens": 270, "hidden": 16, "skew": "zipf"}, TRITON],
    ["moe_combine", "ll", {**ROUTED, "tokens": 5}, SLOTS],
    ["moe_combine", "triton/slots", {**ROUTED, "tokens": 70, "skew": "hot", "top_k": 1}, TRITON],
    [
        "moe_combine",
        "triton/slots",
        {**ROUTED, "tokens": 9, "hidden": 2064, "residual": True, "dtype": "float16"},
        TRITON,
    ],
    ["moe_dispatch", "triton/slots", {**FLOAT8, "tokens": 7, "top_k": 7}, TRITON],
    ["moe_dispatch", "triton/slots", {**WIDE, "tokens": 9, "slot_bytes": 6000}, TRITON],
    ["moe_combine", "triton/slots", {**ROUTED, "tokens": 9, "slot_bytes": 6000}, TRITON],
]
"""More tokens than programs, than a chunk of ids, and than slots; rows of more words than a program
takes."""


CUTE = {"blocks": 64}
CUTE_LAUNCHES = [
    ["all_reduce", "cute/slots", {"tokens": 1, "hidden": 40}, CUTE],
    ["all_reduce", "ll", {"tokens": 1, "hidden": 40}, LL],
    ["all_reduce", "cute/slots", {"tokens": 3, "hidden": 1040, "dtype": "float16"}, CUTE],
    ["all_reduce", "cute/slots", {"tokens": 66, "hidden": 8}, CUTE],
    ["all_reduce", "cute/slots", {"tokens": 2, "hidden": 1040, **FUSED}, CUTE],
    ["moe_dispatch", "cute/slots", {**WIDE, "tokens": 5}, CUTE],
    ["moe_dispatch", "ll", {**WIDE, "tokens": 5}, SLOTS],
    ["moe_dispatch", "cute/slots", {**FLOAT8, "tokens": 7, "hidden": 1040}, CUTE],
    ["moe_dispatch", "cute/slots", {**WIDE, "tokens": 0}, CUTE],
    ["moe_dispatch", "cute/slots", {**WIDE, "tokens": 70, "hidden": 16, "skew": "zipf"}, CUTE],
    ["moe_dispatch", "cute/slots", {**WIDE, "tokens": 3, "top_k": 7}, CUTE],
    ["moe_dispatch", "cute/slots", {**WIDE, "tokens": 9, "slot_bytes": 6000}, CUTE],
    ["all_reduce", "cute/slots", {"tokens": 3, "hidden": 1040, "slot_bytes": 7000}, CUTE],
]
"""More tokens than thread blocks, than chunks of ids, and than slots; rows of more vectors than
threads."""


def results(folder: Path, ranks: int, launches: list[list[object]]) -> list[list[str]]:
    """What was wrong on each rank."""
    for rank in range(ranks):
        with (folder / str(rank)).open("wb") as file:
            file.truncate(WINDOW_BYTES)
    return printed("ranks_host.py", ranks, folder, launches)


def printed(script: str, ranks: int, path: Path, job: object) -> list[Any]:
    """What each rank prints: a process of ``script`` that gets ``path`` and ``job``."""
    command = [sys.executable, str(HERE / script)]
    started = [
        children.start(
            [*command, str(rank), str(ranks), str(path), json.dumps(job)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "TRITON_INTERPRET": "1"},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    return [json.loads(each.communicate(timeout=300)[0]) for each in started]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "launches",
    [SUMS, TRITON_SUMS, DISPATCHES, COMBINES, TRITON_EXPERTS, CUTE_LAUNCHES,
     [*COMBINES[:2], *SUMS[:3], *DISPATCHES[:3]]],
    ids=["all_reduce", "triton", "moe_dispatch", "moe_combine", "triton_experts", "cute",
         "all"],
)  # fmt: skip
def test_every_launch_is_right_on_every_rank(
    launches: list[list[object]], ranks: int, tmp_path: Path
) -> None:
    assert results(tmp_path, ranks, launches) == [[]] * ranks


@pytest.mark.parametrize(
    "launch",
    [SUMS[0], SUMS[2], SUMS[-1], DISPATCHES[0], DISPATCHES[2], COMBINES[0], COMBINES[2],
     TRITON_SUMS[0], TRITON_EXPERTS[0], TRITON_EXPERTS[3], CUTE_LAUNCHES[0], CUTE_LAUNCHES[5]],
    ids=lambda launch: "/".join(launch[:2]),
)  # fmt: skip
def test_a_missing_rank_is_named_and_later_launches_return(
    launch: list[Any], tmp_path: Path
) -> None:
    launches = [[e, v, {**axes, "absent": 1}, c] for e, v, axes, c in (launch, SUMS[3])]
    first, _ = results(tmp_path, 2, launches)
    assert first == ["rank 1 is missing"] * 2


def on_machine(folder: Path, ranks: int, job: dict[str, object]) -> list[Any]:
    """What each rank of a job prints."""
    return printed("ranks_machine.py", ranks, folder / "socket", job)


def axes(**changes: int) -> dict[str, object]:
    return {**summed(1, 2880).values, **changes}


CHECK = {
    "verb": "check",
    "implementation": ["all_reduce", "cuda", "two_shot"],
    "problems": [axes(), axes(hidden=4)],
    "seeds": [1, 2],
    "fuzzing": None,
}


def test_a_check_judges_runs_and_graphs_on_every_rank(tmp_path: Path) -> None:
    for result in on_machine(tmp_path, 2, CHECK):
        assert [v.keys() for v in result["verdicts"]] == [{"config"}, {"config", "skipped"}]
        assert result["environment"]["sku"] == "h200x1-shared"


@pytest.mark.parametrize(
    ("entry", "more"), [("moe_dispatch", {"act_dtype": "bfloat16"}), ("moe_combine", {})]
)
def test_a_check_judges_what_goes_to_experts(
    entry: str, more: dict[str, str], tmp_path: Path
) -> None:
    problem = catalog.entry(entry).described(tokens=3, **ROUTED, **more).values
    job = {**CHECK, "implementation": [entry, "cuda", "ll"], "problems": [problem]}
    found = [result["verdicts"] for result in on_machine(tmp_path, 2, job)]
    assert [verdicts[0].keys() for verdicts in found] == [{"config"}] * 2


PAGES = {"page_size": 4, "dtype": "bfloat16", "senders": "all"}
TRANSFERS = [
    {**PAGES, "count": 9, "pages": 25, "row": 24, "caches": 2},
    {**PAGES, "count": 3, "pages": 8, "row": 1200, "caches": 2, "dtype": "float8_e4m3fn"},
    {**PAGES, "count": 5, "pages": 10, "row": 656, "caches": 1, "dtype": "uint8"},
    {**PAGES, "count": 20, "pages": 9, "row": 33, "caches": 1, "page_size": 3},
    {**PAGES, "count": 4, "pages": 9, "row": 131, "caches": 2, "page_size": 1, "dtype": "uint8"},
    {**PAGES, "count": 2, "pages": 4, "row": 20, "caches": 1, "senders": "first"},
    {**PAGES, "count": 0, "pages": 1, "row": 20, "caches": 2},
]
"""Vectors of 16, 2 and 1 bytes; several tiles a page; more entries than pages; lists of nothing."""


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kernel", [("cuda", "vectors"), ("triton", "words")], ids="/".join)
def test_pages_come_to_the_caches_of_other_ranks(
    kernel: tuple[str, str], ranks: int, tmp_path: Path
) -> None:
    entry = catalog.entry("kv_transfer")
    problems = [entry.problem(**axes, ranks=ranks).values for axes in TRANSFERS]
    job = {**CHECK, "implementation": ["kv_transfer", *kernel], "problems": problems}
    for result in on_machine(tmp_path, ranks, job):
        assert [verdict.keys() for verdict in result["verdicts"]] == [{"config"}] * len(problems)


def test_a_check_finds_a_rank_with_other_inputs(tmp_path: Path) -> None:
    results = on_machine(tmp_path, 2, {**CHECK, "last": {"seeds": [1, 3]}})
    for result in results:
        assert result["verdicts"][0]["wrong"].startswith("seed")


FUZZING = {"examples": 6, "random_seed": 1, "limit": 40, "kernels": 2}


@pytest.mark.parametrize(
    ("entry", "variant"),
    [("all_reduce", "ll"), ("moe_combine", "ll"), ("kv_transfer", "vectors")],
)
def test_ranks_draw_the_same_random_problems(entry: str, variant: str, tmp_path: Path) -> None:
    job = {**CHECK, "implementation": [entry, "cuda", variant], "problems": [], "fuzzing": FUZZING}
    for result in on_machine(tmp_path, 2, job):
        assert result["failure"] is None
        assert result["examples"] == FUZZING["examples"]


def test_a_wrong_random_problem_is_shrunk_on_all_ranks(tmp_path: Path) -> None:
    job = {**CHECK, "problems": [], "fuzzing": FUZZING, "last": {"is_broken": True}}
    first, last = (result["failure"] for result in on_machine(tmp_path, 2, job))
    assert first == last
    assert "rank 1: seed" in first
    assert "tokens=1" in first


def test_ranks_with_different_problems_are_told(tmp_path: Path) -> None:
    job = {**CHECK, "last": {"problems": [axes(tokens=2)]}}
    for error in on_machine(tmp_path, 2, job):
        assert error.startswith("rank 1 loads all_reduce/cuda/two_shot")
        assert "but rank 0 loads" in error


@pytest.mark.parametrize(
    ("entry", "more", "variants"),
    [("all_reduce", {}, ["ll", "one_shot", "slots", "two_shot"]),
     ("moe_dispatch", {**WIDE, "hidden": 32}, ["ll", "tiles"]),
     ("kv_transfer", TRANSFERS[0], ["vectors"])],
)  # fmt: skip
def test_a_race_times_each_variant(
    entry: str, more: dict[str, Any], variants: list[str], tmp_path: Path
) -> None:
    sizes = {} if entry == "kv_transfer" else {"tokens": 1, "hidden": 2880}
    problem = catalog.entry(entry).described(**{**sizes, **more})
    implementations = [("cuda", variant) for variant in variants]
    job = {"verb": "race", "entry": entry, "problem": problem.values, "seed": 1,
           "implementations": implementations, "peers": True}  # fmt: skip
    for result in on_machine(tmp_path, 2, job):
        assert [(c[0], c[1]) for c in result["contestants"]] == implementations
        for *_, wrong, _, times, _ in result["contestants"]:
            assert len(times) == 3
            assert not wrong
        assert result["environment"]["sku"] == "h200x1-shared"
        assert result["left_out"] == "NCCL and torch need a GPU for each rank"


def test_a_race_goes_on_without_what_one_rank_cannot_compile(tmp_path: Path) -> None:
    problem = catalog.entry("all_reduce").described(tokens=1, hidden=2880)
    job = {"verb": "race", "entry": "all_reduce", "problem": problem.values, "seed": 1,
           "implementations": [("cuda", "ll"), ("cuda", "slots")], "peers": False,
           "last": {"too_new": "all_reduce/cuda/ll"}}  # fmt: skip
    for result in on_machine(tmp_path, 2, job):
        raced, refused = result["contestants"]
        assert (raced[1], raced[3]) == ("slots", "")
        assert refused[1] == "ll"
        assert refused[3:5] == ["rank 1: all_reduce/cuda/ll does not compile", "compile_error"]
