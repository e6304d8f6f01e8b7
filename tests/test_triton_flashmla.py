"""Triton kernels of `flashmla` and `mla_kv_write` in the interpreter; no GPU needed.

tests/test_interpreter.py tests random problems, tests/test_compiles.py the machine code.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.reference.flashmla import latent
from kernelcat.reference.mla_kv_write import appended
from kernelcat.runtime import gpu

TARGET = gpu.find("h200")


def attention(variant: str, *shape: int, block_n: int = 64, warps: int = 8, **more: int | str):
    """``shape`` is batch, query tokens, heads, context; six sequences of any length."""
    config = {"block_n": block_n, "stages": 2, "warps": warps}
    config |= {name: more.pop(name) for name in ("block_m", "per_sm", "merge") if name in more}
    problem = latent(*shape, lengths="ragged", **more)
    return ("flashmla", variant, config, dict(problem.values))


SPLIT = {"block_m": 16, "per_sm": 2, "warps": 4}
CASES = {
    "tiles that rows of two tokens share": attention("tiled", 3, 4, 24, 192, block_m=64),
    "pages of one token": attention("tiled", 3, 2, 8, 90, 1, block_m=16, block_n=32, warps=4),
    "a page with several tiles": attention("tiled", 2, 1, 16, 256, 128, block_m=16, warps=4),
    "packed rows": attention("tiled", 2, 3, 16, 130, 16, block_m=32, kv_dtype="uint8"),
    "pieces merged by the last": attention("split", 5, 2, 20, 320, merge="last", **SPLIT),
    "pieces merged by a launch": attention("split", 5, 2, 20, 320, merge="launch", **SPLIT),
    "packed pieces": attention(
        "split", 2, 1, 16, 320, merge="launch", kv_dtype="uint8", dtype="float16", **SPLIT
    ),
    "fewer tiles than programs": attention("split", 1, 1, 8, 64, merge="last", **SPLIT),
}

REPLAYED = """
def replayed(name, variant, config, axes):
    # Launches with one set of workspaces: full lengths, then shorter lengths, then full lengths.
    entry, implementation = catalog.entry(name), catalog.implementation(name, "triton", variant)
    problem = entry.problem(**axes)
    program = implementation.program(problem, Config(config), device.gpu)
    spaces = {name: np.zeros(size, np.uint8) for name, size in program.workspaces.items() if size}
    prepared, verdicts = gate.prepare(entry, problem, device), []
    q_lens, lens = np.diff(prepared.arrays["cu_q"]), prepared.arrays["kv_lens"].copy()
    for kv_lens in (lens, np.maximum(lens // 3, q_lens), lens):
        arrays = prepared.arrays
        arrays["kv_lens"][...] = kv_lens
        values = {t.name: gate.dtypes.decode(arrays[t.name], t.dtype_of(problem))
                  for t in entry.inputs}
        interpret(replace(program, workspaces={}), {**arrays, **spaces})
        out = gate.dtypes.decode(arrays["out"], problem["dtype"])
        expected = entry.oracle(problem, values)
        verdicts.append(bool(np.allclose(out, expected["out"], 2.01 / 128, 8e-4))
                        and bool(np.allclose(arrays["lse"], expected["lse"], 1e-5, 2e-4)))
    return verdicts, int(spaces.get("arrivals", np.zeros(1)).sum())
"""
MERGES = {f"merged by {way}, again": (*CASES[f"pieces merged by {name}"], "replayed")
          for way, name in (("last", "the last"), ("launch", "a launch"))}  # fmt: skip


@pytest.fixture(scope="module")
def results(interpreted) -> dict[str, list]:
    return interpreted(CASES | MERGES, REPLAYED)


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_right_at_its_edges(results, name: str) -> None:
    reason, passed, detail = results[name]
    assert reason is None
    assert passed, detail


@pytest.mark.parametrize("name", MERGES)
def test_a_replayed_launch_follows_the_lengths(results, name: str) -> None:
    assert results[name] == [[True, True, True], 0]


def test_an_empty_problem_has_no_steps() -> None:
    for problem in (latent(2, 0, 16, 64), appended(2, q_len=0), latent(0, 0, 16, 64)):
        for implementation in catalog.in_language(problem.entry, "triton"):
            config = implementation.default(problem, TARGET)
            assert implementation.program(problem, config, TARGET).steps == ()


SPLIT_CONFIG = {**SPLIT, "block_n": 64, "stages": 2, "warps": 8, "merge": "last"}


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (latent(1, 1, 128, 64), {"block_m": 64, "stages": 7}, "do not fit in shared memory"),
        (latent(2048, 1, 128, 64), {}, "16384 tiles of rows are more than 4096"),
    ],
)
def test_split_is_illegal_with_a_reason(problem, config: dict, reason: str) -> None:
    split = catalog.implementation("flashmla", "triton", "split")
    assert reason in (split.why_not(Config(SPLIT_CONFIG | config), problem, TARGET) or "")


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (latent(1, 1, 16, 64), {"block_m": 64}, "half empty for 16"),
        (latent(1, 1, 128, 64), {"block_m": 64, "warps": 4}, "spill registers for 64 x 512"),
    ],
)
def test_split_is_unpromising_with_a_reason(problem, config: dict, reason: str) -> None:
    split = catalog.implementation("flashmla", "triton", "split")
    config = Config(SPLIT_CONFIG | config)
    assert split.why_not(config, problem, TARGET) is None
    assert reason in (split.unpromising(config, problem, TARGET) or "")


def test_mla_kv_write_is_compiled_without_fused_multiply_add() -> None:
    """A fused product of RoPE would round differently from the oracle, and change stored bytes."""
    for implementation in catalog.in_language("mla_kv_write", "triton"):
        problem = appended(4)
        (step,) = implementation.program(
            problem, implementation.default(problem, TARGET), TARGET
        ).steps
        assert step.source.options["enable_fp_fusion"] is False
