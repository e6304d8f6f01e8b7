"""`paged_attn` in CUDA, registers and staged: on the host, with clusters, and what they refuse."""

from __future__ import annotations

import ctypes
import shutil
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from cuda_host import HostCuda, library

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.jit import build
from kernelcat.reference.paged_attn import FP8, attention
from kernelcat.runtime import gpu
from kernelcat.verify import gate, inspect

H200 = gpu.find("h200")
ENTRY = catalog.entry("paged_attn")
REGISTERS = catalog.implementation("paged_attn", "cuda", "registers")
STAGED = catalog.implementation("paged_attn", "cuda", "staged")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def config(tokens: int, num_warps: int, cluster: int = 1, blocks_per_sm: int = 1) -> Config:
    return Config(tokens=tokens, num_warps=num_warps, cluster=cluster, blocks_per_sm=blocks_per_sm)


def staged(chosen: Config, ahead: bool = False) -> Config:
    return Config({**chosen, "ahead": ahead})


CASES: dict[str, tuple[Problem, Config, tuple[int, ...], tuple[int, ...]]] = {
    "a cluster, in two passes": (
        attention(6, 8, 1, 64, 208, 16, has_sinks=True, softcap=3.0), config(16, 2, 4),
        (1, 1, 1, 1, 0, 1), (0, 1, 16, 33, 64, 208),
    ),
    "a window, two queries": (
        attention(
            5, 12, 2, 128, 128, 32, q_len=2, window=40, has_sinks=True, has_scales=True,
            dtype="float16", kv_dtype="float16",
        ),
        config(16, 2), (2, 2, 1, 0, 2), (2, 41, 42, 0, 128),
    ),
    "a window in a long table of short pages": (
        attention(3, 5, 1, 64, 300, 1, window=70), config(64, 2, 2), (1, 1, 1), (71, 300, 3),
    ),
}  # fmt: skip
"""A problem, a configuration, and new tokens and all tokens of each sequence."""

STAGED_CASES = {
    **CASES,
    "two lanes a vector, sixteen warps in a cluster": (
        attention(3, 16, 2, 64, 320, 32, has_sinks=True), config(16, 8, 2),
        (1, 1, 1), (7, 129, 320),
    ),
    "two lanes a vector, six rows, no cluster": (
        attention(2, 6, 1, 64, 80, 16), config(16, 8), (1, 1), (80, 0),
    ),
    "long heads, two row tiles": (
        attention(2, 10, 2, 128, 96, 16, q_len=2), config(32, 2, 2), (2, 1), (95, 3),
    ),
}  # fmt: skip


def entry_of(q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> Any:
    """The entry with sequences of these lengths, NaN beyond them, and sinks of -infinity."""

    def make_inputs(problem: Problem, normal: Any) -> dict[str, Any]:
        inputs = ENTRY.make_inputs(problem, normal)
        inputs["kv_lens"][:] = kv_lens
        inputs["cu_q"][:] = [0, *accumulate(q_lens)]
        size = problem["page_size"]
        for pages, kv_len in zip(inputs["block_table"], kv_lens, strict=True):
            for token in range(kv_len, problem["table_width"] * size):
                for name in ("k_cache", "v_cache"):
                    inputs[name][pages[token // size], token % size] = np.nan
        if problem["has_sinks"]:
            inputs["sinks"][1::3] = -np.inf
        return inputs

    def oracle(problem: Problem, arrays: dict[str, Any]) -> dict[str, Any]:
        """Zeros for a head without visible keys whose sink is -infinity."""
        with np.errstate(invalid="ignore"):
            results = ENTRY.oracle(problem, arrays)
        results["out"][results["lse"] == -np.inf] = 0
        return results

    return replace(ENTRY, make_inputs=make_inputs, oracle=oracle)


@pytest.fixture(scope="module")
def device() -> HostCuda:
    return HostCuda()


def check(
    implementation: Implementation,
    case: tuple[Problem, Config, tuple[int, ...], tuple[int, ...]],
    chosen: Config,
    device: HostCuda,
) -> None:
    even, _, q_lens, kv_lens = case
    problem = ENTRY.problem(**{**even.values, "tokens": sum(q_lens)})
    assert implementation.why_not(chosen, problem, H200) is None
    prepared = gate.prepare(entry_of(q_lens, kv_lens), problem, device)
    verdict = prepared.verify(device.load(implementation, problem, chosen))
    assert verdict.passed, verdict.detail


@pytest.mark.slow
@needs_gxx
@pytest.mark.parametrize("name", CASES)
def test_registers_is_right_on_the_host(name: str, device: HostCuda) -> None:
    check(REGISTERS, CASES[name], CASES[name][1], device)


@pytest.mark.slow
@needs_gxx
@pytest.mark.parametrize("name", STAGED_CASES)
def test_staged_is_right_on_the_host(name: str, device: HostCuda) -> None:
    check(STAGED, STAGED_CASES[name], staged(STAGED_CASES[name][1]), device)


PREFETCHED = ("q", "k_cache", "v_cache")


def zeros(problem: Problem, inputs: dict[str, Any]) -> dict[str, Any]:
    """Arrays of a launch: the indices of ``inputs``, and zeros for everything else."""
    indices = ("block_table", "kv_lens", "cu_q")
    others = ("sinks", "k_scale", "v_scale")
    return {
        **{name: inputs[name].astype("int32") for name in indices},
        **{name: np.zeros(inputs[name].shape, "float32") for name in others if name in inputs},
        **{name: np.zeros(inputs[name].shape, "uint16") for name in PREFETCHED},
        "out": np.zeros(inputs["q"].shape, "uint16"),
        "lse": np.zeros(inputs["q"].shape[:2], "float32"),
    }


def prefetched(
    problem: Problem, chosen: Config, arrays: dict[str, Any], hints: dict[str, Any]
) -> Counter[int]:
    """How often a launch prefetched each address of 16 bytes.

    ``hints`` is what the kernel finds in arrays of these names before it may rely on them.
    """
    host, spans = library(STAGED.program(problem, chosen, H200).steps[0].source), 10_000
    target = np.zeros((spans, 2), "uint64")
    for name, values in hints.items():
        memory = arrays[name].ctypes.data
        host.set_hints(
            ctypes.c_void_p(memory), ctypes.c_long(values.size), ctypes.c_void_p(values.ctypes.data)
        )
    HostCuda().load(STAGED, problem, chosen)(arrays)()
    count = host.take_prefetched(ctypes.c_void_p(target.ctypes.data), ctypes.c_long(spans))
    assert count <= spans
    return Counter(
        address
        for start, num_bytes in target[:count].tolist()
        for address in range(start, start + num_bytes, 16)
    )


def visible_rows(
    problem: Problem, arrays: dict[str, Any], q_lens: tuple[int, ...], kv_lens: tuple[int, ...]
) -> Counter[int]:
    """Every address of 16 bytes of the queries, and of the keys and values that they see."""
    window, size, found = problem["window"], problem["page_size"], Counter[int]()
    for s, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        first = max(kv_len - q_len + 1 - window, 0) if window else 0
        start = arrays["cu_q"][s]
        rows = [*arrays["q"][start : start + q_len]]
        for token in range(first, kv_len):
            page = arrays["block_table"][s, token // size]
            rows += [arrays[name][page, token % size] for name in ("k_cache", "v_cache")]
        for row in rows:
            found.update(range(row.ctypes.data, row.ctypes.data + row.nbytes, 16))
    return found


@pytest.mark.slow
@needs_gxx
@pytest.mark.parametrize("name", ["a cluster, in two passes", "a window, two queries"])
def test_what_is_visible_is_prefetched_once_and_nothing_else(name: str) -> None:
    """And what table and lengths hold too early leads to nothing outside of the arrays."""
    even, chosen, q_lens, kv_lens = STAGED_CASES[name]
    problem = ENTRY.problem(**{**even.values, "tokens": sum(q_lens)})
    inputs = entry_of(q_lens, kv_lens).make_inputs(
        problem, lambda shape: np.zeros(shape, "float32")
    )
    arrays, ahead = zeros(problem, inputs), staged(chosen, ahead=True)
    assert prefetched(problem, ahead, arrays, {}) == visible_rows(problem, arrays, q_lens, kv_lens)

    random = np.random.default_rng(1)
    bounds = [(arrays[n].ctypes.data, arrays[n].ctypes.data + arrays[n].nbytes) for n in PREFETCHED]
    sizes = {n: arrays[n].shape for n in ("block_table", "kv_lens", "cu_q")}
    for limit in (1 << 31, problem["pages"] + 3, 300):
        hints = {n: random.integers(-limit, limit, sizes[n]).astype("int32") for n in sizes}
        addresses = prefetched(problem, ahead, arrays, hints)
        assert all(any(low <= a < high for low, high in bounds) for a in addresses)
        if limit < 1 << 31:
            assert addresses
    assert prefetched(problem, staged(chosen), arrays, {}) == Counter()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_dtype": FP8}, "must be bfloat16"),
        ({"q_len": 3}, "24 rows are more than the 16"),
        ({"has_scales": True, "page_scales": True}, "scales of pages"),
    ],
)
def test_what_registers_cannot_hold_is_refused(changes: dict[str, Any], reason: str) -> None:
    problem = attention(1, 64, 8, 64, 3008, 16, **changes)
    assert reason in str(REGISTERS.why_not(config(32, 4), problem, H200))


def test_accumulators_that_exceed_static_shared_memory_are_refused() -> None:
    problem = attention(1, 64, 8, 128, 3008, 16)
    assert "static shared memory" in str(REGISTERS.why_not(config(16, 16), problem, H200))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decode-1x3008-64/8x64-p16-sinks", config(64, 8, 8)),
        ("decode-1x3008-64/8x64-p16-window128-sinks", config(32, 4)),
        ("decode-64x1024-64/8x64-p16-window128-sinks", config(32, 4, 1, 4)),
    ],
)
def test_few_tokens_are_loaded_at_once(name: str, expected: Config) -> None:
    """Every warp has one tile at most, and all thread blocks run at the same time."""
    assert REGISTERS.default(ENTRY.problems[name], H200) == expected


@pytest.mark.parametrize(
    ("name", "expected", "ahead"),
    [
        ("decode-1x3008-64/8x64-p16-sinks", config(64, 6, 8, 2), False),
        ("decode-1x3008-64/8x64-p16-window128-sinks", config(16, 8), True),
        ("decode-64x1024-64/8x64-p16-window128-sinks", config(16, 4, 1, 8), False),
    ],
)
def test_two_launches_have_room_for_each_other(name: str, expected: Config, ahead: bool) -> None:
    """And there is no more room than that, so that a thread has all registers it can have."""
    problem = ENTRY.problems[name]
    assert STAGED.default(problem, H200) == staged(expected, ahead)
    more = Config({**staged(expected), "blocks_per_sm": 8, "num_warps": 2, "tokens": 16})
    if expected["blocks_per_sm"] < 8:
        assert "do not need room" in str(STAGED.unpromising(more, problem, H200))


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_room_for_a_third_cluster_leaves_enough_registers(ahead: bool) -> None:
    problem = ENTRY.problems["decode-1x3008-64/8x64-p16-sinks"]
    step = STAGED.program(problem, staged(config(32, 8, 16, 3), ahead), H200).steps[0]
    artifact = build(step.source, H200.arch)
    assert artifact.metadata["spill_bytes"] == 0
    assert 3 * step.block * artifact.metadata["registers"] <= 1 << 16
    assert inspect.inspect(artifact).has("UBLKPF") == ahead


def test_pages_are_prefetched_for_windows_of_few_sequences_only() -> None:
    """Measured on an H200: 5.9 us for five short sequences without a window, 2.8 if not ahead."""
    for name, cluster in (
        ("1x3008-64/8x64-p16-sinks", 16),
        ("64x1024-64/8x64-p16-window128-sinks", 1),
    ):
        problem, chosen = (
            ENTRY.problems[f"decode-{name}"],
            staged(config(16, 4, cluster), ahead=True),
        )
        assert "few sequences" in str(STAGED.unpromising(chosen, problem, H200))
    window = ENTRY.problems["decode-1x3008-64/8x64-p16-window128-sinks"]
    assert STAGED.unpromising(staged(config(32, 4), ahead=True), window, H200) is None
