"""Calls of one layer with ever new batch sizes: cheap first calls, few kernels, none after prepare.

Everything between a call and the driver is the real code (`sized_calls.py`).
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from campaign import only_in_campaigns

pytest.importorskip("torch")

import sized_calls
import torch
from sized_calls import LAYERS, Machine, arguments, problem_of

import kernelcat
from kernelcat import catalog
from kernelcat.call import ahead, arrays, operator
from kernelcat.call.ahead import Asked
from kernelcat.call.resizing import Family
from kernelcat.call.sharing import Choices
from kernelcat.catalog import discovery
from kernelcat.catalog.axes import Axis
from kernelcat.jit import cache
from kernelcat.runtime import driver, gpu, workspaces

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
H200 = gpu.SKUS["h200"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    with sized_calls.machine(monkeypatch, tmp_path / "artifacts") as found:
        yield found


def operator_of(layer: str, language: str | None = None) -> Any:
    return kernelcat.get(LAYERS[layer][0], language=language)


def call(op: Any, layer: str, batch: int) -> None:
    inputs, named = arguments(problem_of(layer, batch))
    op(*inputs, **named)


# ---- cheap first calls -------------------------------------------------------------------------


def functions_called(run: Callable[[], Any]) -> int:
    """The number of functions, in Python and in C, that ``run`` calls."""
    count = 0

    def watch(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


MAX_FUNCTIONS = {
    "gemm": 600, "fp8_gemm": 560, "nvfp4_matmul": 440, "paged_attn": 780, "flashmla": 770,
    "moe_mlp": 2240, "moe_gemm": 700, "moe_route": 730, "qkv_rope_write": 1800, "out_router": 650,
    "rms_norm": 350, "lm_head": 530, "sample": 420,
}  # fmt: skip
"""Layer -> functions that a first call of a new size may call, a tenth more than it calls.

A function takes about 0.25 us on the machines of CI, which are too busy for a clock. A program of
`moe_mlp` has up to four kernels, and its builder looks for the routing kernel's configuration; that
of `qkv_rope_write` has two, as that of `flashmla/cuda/dealt`.
"""

LANGUAGES = [
    (layer, language) for layer in LAYERS for language in catalog.languages(LAYERS[layer][0])
]


@pytest.mark.parametrize(("layer", "language"), LANGUAGES)
def test_a_first_call_of_a_new_size_only_works_out_launch_values(
    machine: Machine, layer: str, language: str
) -> None:
    op = operator_of(layer, language)
    for batch in (40, 39, 96, 95):
        call(op, layer, batch)
    compiled, counts = len(machine.compiled), []
    for batch in (37, 38, 93, 94, 92):
        inputs, named = arguments(problem_of(layer, batch))
        counts.append(functions_called(lambda i=inputs, n=named: op(*i, **n)))
    assert len(machine.compiled) == compiled
    assert statistics.median(counts) <= MAX_FUNCTIONS[layer], counts


def test_the_count_of_functions_sees_a_choice(machine: Machine) -> None:
    """A size whose representative is new needs a choice, and more functions."""
    op = operator_of("gemm")
    for batch in (40, 96):
        call(op, "gemm", batch)
    inputs, named = arguments(problem_of("gemm", 300))
    assert functions_called(lambda: op(*inputs, **named)) > 2 * MAX_FUNCTIONS["gemm"]


MAX_FUNCTIONS_OF_A_CHOICE = {
    "gemm": 10000, "paged_attn": 12400, "moe_route": 1400, "rms_norm": 1000,
}  # fmt: skip
"""Layer -> functions of a first call whose representative is new, by a measured row or a model.

Models estimate the 120 configurations of a portfolio, in about a millisecond.
"""


@pytest.mark.parametrize("layer", MAX_FUNCTIONS_OF_A_CHOICE)
def test_a_choice_by_rows_or_a_model_is_cheap(machine: Machine, layer: str) -> None:
    op = operator_of(layer)
    for batch in (40, 39, 96, 95):
        call(op, layer, batch)
    counts = []
    for batch in (104, 112, 120):
        inputs, named = arguments(problem_of(layer, batch))
        counts.append(functions_called(lambda i=inputs, n=named: op(*i, **n)))
    assert statistics.median(counts) <= MAX_FUNCTIONS_OF_A_CHOICE[layer], counts


def test_arrays_are_read_once_and_guards_wait_for_a_second_call(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, library = operator_of("gemm"), arrays.torch()
    op(*arguments(problem_of("gemm", 40))[0][:2])
    calls: list[str] = []
    for name in ("scan", "matcher"):
        method = getattr(library, name)
        monkeypatch.setattr(library, name, lambda x, m=method, n=name: calls.append(n) or m(x))
    operator._scans[torch.Tensor] = library.scan
    (a, b, *_), _ = arguments(problem_of("gemm", 37))
    for expected in (["scan"], ["scan", "matcher"], []):
        calls.clear()
        op(a, b)
        assert calls == expected


def test_workspaces_of_new_sizes_are_cut_from_one_piece(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, sizes = operator_of("lm_head", "triton"), []
    call(op, "lm_head", 40)
    cuda = driver.opened()
    allocate = cuda.allocate
    monkeypatch.setattr(cuda, "allocate", lambda n, device: sizes.append(n) or allocate(n, device))
    for batch in range(1, 9):
        call(op, "lm_head", batch)
    assert sizes == []
    for batch in range(100, 150):
        call(op, "lm_head", batch)
    assert set(sizes) == {workspaces.PIECE_BYTES} and len(sizes) <= 3


# ---- problems of other sizes -------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_a_family_reads_the_problems_that_the_full_signature_reads(
    machine: Machine, layer: str
) -> None:
    op = operator_of(layer)
    inputs, named = arguments(problem_of(layer, 40))
    op(*inputs, **named)
    ((family, *_),) = op._families._known.values()
    dice = random.Random(layer)
    for batch in (0, 1, *(dice.randrange(600) for _ in range(10))):
        problem = problem_of(layer, batch)
        inputs, named = arguments(problem)
        outs = named.pop("out", ())
        arrays = (*inputs, *(outs if isinstance(outs, tuple) else (outs,)))
        shapes = [x if x is None else tuple(x.shape) for x in arrays]
        assert family.problem(shapes, named) == problem


@pytest.mark.parametrize(
    "shapes",
    [
        [(8, 8), (6, 8, 1), None, None],
        [(8, 8), (6, 9), None, None],
        [(8, 1 << 31), (6, 1 << 31), None, None],
        [(8, 8), (6, 8), None, None, (8, 7)],
    ],
)
def test_a_family_leaves_what_is_wrong_to_the_full_signature(shapes: list[Any]) -> None:
    gemm = catalog.entry("gemm")
    problem = gemm.problem(M=4, N=6, K=8, dtype="float16")
    first = [(4, 8), (6, 8), None, None, (4, 6)][: len(shapes)]
    family = Family(gemm, problem, first)
    assert family.problem(first, {}) == problem
    with suppress(IndexError):
        assert family.problem(shapes, {}) is None


def test_a_keyword_is_no_size_that_arrays_may_change() -> None:
    lm_head = catalog.entry("lm_head")
    problem = lm_head.problem(tokens=4, vocab=64, hidden=8, top_k=2, dtype="float16")
    family = Family(lm_head, problem, [(4, 8), (64, 8), (4, 2), (4, 2)], ["top_k"])
    assert family.problem([(5, 8), (64, 8), (5, 2), (5, 2)], {"top_k": 2})["tokens"] == 5
    assert family.problem([(5, 8), (64, 8), (5, 3), (5, 3)], {"top_k": 2}) is None


# ---- choices that sizes share ------------------------------------------------------------------


def test_sizes_are_rounded_up_by_an_eighth_of_a_power_of_two_at_most() -> None:
    assert [Axis.round_up(n) for n in (0, 1, 15, 16, 17, 31, 33, 65, 1000)] == [
        0, 1, 15, 16, 18, 32, 36, 72, 1024,
    ]  # fmt: skip
    for size in range(1, 5000):
        rounded = Axis.round_up(size)
        assert size <= rounded <= size * 9 / 8 and Axis.round_up(rounded) == rounded
        assert (size - 1).bit_length() == (rounded - 1).bit_length(), "another bucket"


def test_rows_of_a_matrix_product_are_rounded_finely_above_256() -> None:
    """522 rows are three tiles of 176, as 528 are; 576 would be four."""
    rows, batch = catalog.entry("gemm").axis("M"), catalog.entry("paged_attn").axis("batch")
    assert [rows.shared(n) for n in (200, 256, 257, 522, 2850)] == [208, 256, 264, 528, 2880]
    assert [batch.shared(n) for n in (200, 257, 522)] == [208, 288, 576]
    for size in range(257, 5000):
        assert size <= rows.shared(size) <= size * 33 / 32


@pytest.mark.parametrize("layer", LAYERS)
def test_weights_keep_their_sizes_and_what_varies_is_rounded(layer: str) -> None:
    entry = catalog.entry(LAYERS[layer][0])
    problem = problem_of(layer, 61)
    rounded = entry.rounded(problem)
    changed = {name for name in entry.axis_names if rounded[name] != problem[name]}
    assert changed and all(entry.axis(name).varies for name in changed)
    assert entry.bucket(rounded) == entry.bucket(problem) and entry.why_not(rounded) is None


def test_the_choice_does_not_depend_on_which_size_was_called_first() -> None:
    gemm, dice = catalog.entry("gemm"), random.Random(1)
    sizes = [97, 98, 101, 104]
    found = set()
    for _ in range(3):
        dice.shuffle(sizes)
        choices = Choices(gemm, operator_of("gemm").pin)
        decisions = [choices.choose(problem_of("gemm", size), H200) for size in sizes]
        found |= {(d.implementation.name, d.config, d.why) for d in decisions}
    assert len(found) == 1


def test_a_measured_problem_has_its_own_choice_and_its_neighbours_share_the_bucket(
    machine: Machine,
) -> None:
    op, sizes = operator_of("gemm"), {"N": 5120, "K": 2880, "dtype": "bfloat16"}
    assert op.explain(M=64, **sizes).why == "exact"
    assert op.explain(M=63, **sizes).why == "bucket"


# ---- few kernels, and none after prepare -------------------------------------------------------

MAX_KERNELS = 20
"""Kernels that 200 batch sizes of one layer may need."""


@pytest.mark.parametrize(
    "layer", ["gemm", "paged_attn", "moe_mlp", "rms_norm", "sample",
              *[values[0] for values in only_in_campaigns(
                  (name,) for name in ("fp8_gemm", "nvfp4_matmul", "flashmla", "moe_gemm",
                                       "moe_route", "lm_head"))]],
)  # fmt: skip
def test_200_batch_sizes_need_few_kernels_and_compile_none_after_prepare(
    machine: Machine, layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = random.Random(layer).sample(range(1, 401), 200)
    asked = [Asked(problem_of(layer, size)) for size in sizes]
    report = ahead.build_bundle(asked, H200, tmp_path / "kernels")
    assert not report.refused and 1 <= report.kernels <= MAX_KERNELS
    assert len(machine.compiled) == report.kernels

    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "prepared", {})
    monkeypatch.setattr(discovery, "ahead", set())
    monkeypatch.setenv("KERNELCAT_CACHE", str(tmp_path / "empty"))
    kernelcat.prepare(tmp_path / "kernels")
    machine.compiled.clear()
    op = operator_of(layer)
    for size in sizes:
        call(op, layer, size)
    assert machine.compiled == [], "something was compiled"
    assert not (tmp_path / "empty").exists()
