"""Profiles of decode steps: ranges, kernels, gaps, and the bytes that a step must read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kernelcat import moe
from kernelcat.cli import main
from kernelcat.errors import InvalidArgument, KernelcatError, Unsupported
from kernelcat.moe import ranges
from kernelcat.moe.bench import prompts
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.profile import WINDOW, KernelTime, StepProfile, profile_decoding, summary
from kernelcat.moe.step_bytes import bandwidth_of, step_bytes
from kernelcat.moe.weights import Weights
from kernelcat.runtime import gpu


@pytest.fixture(scope="module")
def model() -> moe.Decoder:
    return moe.random_model("small-gpt-oss", "cpu")


def engine(model: moe.Decoder, context: int = 80, **settings: Any) -> Engine:
    limits = Limits(256, 2, 2, context)
    return Engine(model, EngineSettings(limits, page_size=16, num_pages=(20, 20), **settings))


# ---- ranges -------------------------------------------------------------------------------------


def test_ranges_are_one_object_that_does_nothing_while_nobody_records() -> None:
    first = ranges.span("schedule")
    assert ranges.span("layer", 3) is first is ranges.span("output")
    with first, first:
        pass
    assert ranges.span("schedule") is first


def test_ranges_end_with_their_recording_also_after_an_error() -> None:
    nothing = ranges.span("schedule")
    with pytest.raises(ZeroDivisionError), ranges.for_profiler():
        assert ranges.span("schedule") is not nothing
        1 / 0  # noqa: B018
    assert ranges.span("schedule") is nothing


def test_a_step_has_a_range_for_each_phase_and_each_layer(
    model: moe.Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[str] = []

    @contextmanager
    def marked(name: str) -> Iterator[None]:
        marks.append(name)
        yield
        marks.append(f"/{name}")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range", marked)
    served = engine(model)
    served.submit([1, 2, 3])
    with ranges.for_nvtx():
        served.step()
    layers = [mark for i in range(2) for mark in (f"layer {i}", f"/layer {i}")]
    assert marks == [
        "schedule", "/schedule", "launch", *layers, "/launch", "sample", "/sample", "wait", "/wait",
        "output", "/output",
    ]  # fmt: skip
    assert {mark for mark in marks if mark in ranges.PHASES} == set(ranges.PHASES)
    served.step()
    assert len(marks) == 14  # nothing is marked outside


def test_nvtx_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(Unsupported, match="built for CUDA"):
        ranges.for_nvtx()


# ---- the summary of a trace ---------------------------------------------------------------------


def event(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur}


TRACE = [
    event(WINDOW, 100.0, 100.0, "user_annotation"),
    event("gemm", 90.0, 5.0),  # before the window
    event("gemm", 110.0, 10.0),
    event("attn", 115.0, 15.0),  # a dependent launch: begins before gemm ends at 120
    event("short", 118.0, 4.0),  # runs beside both all the time
    event("Memcpy DtoH", 134.0, 2.0, "gpu_memcpy"),
    event("gemm", 150.0, 10.0),
    event("attn", 160.0, 10.0),
    event("gemm", 250.0, 5.0),  # after the window
    event("schedule", 101.0, 3.0, "user_annotation"),
    event("schedule", 141.0, 5.0, "user_annotation"),
    event("layer 0", 102.0, 3.0, "user_annotation"),
    event("aten::add", 103.0, 3.0, "cpu_op"),
    event("schedule", 101.0, 9.0, "gpu_user_annotation"),
]


def test_kernels_and_gaps_add_up_to_the_step() -> None:
    found = summary(TRACE, num_steps=2)
    # gemm 110-120, attn alone 120-130, nothing 130-134, copy 134-136, nothing 136-150, then 150-170
    assert found["kernels"] == (
        KernelTime("gemm", launches=1, us=10, duration_us=10, gap_us=7),
        KernelTime("attn", launches=1, us=10, duration_us=12.5, gap_us=0),
        KernelTime("Memcpy DtoH", launches=0.5, us=1, duration_us=1, gap_us=2),
        KernelTime("short", launches=0.5, us=0, duration_us=2, gap_us=0),
    )
    assert (found["busy_us"], found["gap_us"], found["device_us"]) == (21, 9, 30)
    assert found["phases"] == {**dict.fromkeys(ranges.PHASES, 0.0), "schedule": 4.0}


def profile(**changes: Any) -> StepProfile:
    fields = {
        "batch": 8, "context": 1024, "steps": 2, "step_us": 50.0, "floor_bytes": 42_800_000,
        "bandwidth": 4.28e12, "trace": "t.json", **summary(TRACE, 2), **changes,
    }  # fmt: skip
    return StepProfile(**fields)


def test_the_table_has_kernels_gaps_and_the_share_of_the_floor() -> None:
    found = profile()
    assert found.floor_us == pytest.approx(10) and found.floor_share == pytest.approx(1 / 3)
    sheet = found.sheet()
    assert sheet.lines[0] == ("gemm", "1", "10.0", "33.3%", "10.0", "7.0")
    assert sheet.total == ("all", "3", "21.0", "70.0%", "", "9.0")
    notes = " ".join(sheet.notes)
    assert "0.0428 GB must be read: 10.0 us at 4.28 TB/s, 33% of the step's time." in notes
    assert "schedule 4" in notes and "t.json" in notes
    published = json.loads(json.dumps(found.published(), default=vars))
    assert published["floor_share"] == pytest.approx(1 / 3)
    assert published["kernels"][0]["name"] == "gemm"


def test_the_table_of_a_cpu_has_phases() -> None:
    nothing = {"kernels": (), "device_us": 0.0, "busy_us": 0.0, "gap_us": 0.0, "bandwidth": None}
    found = profile(**nothing)
    assert found.floor_us is None and found.floor_share is None
    assert ("schedule", "4.0") in found.sheet().lines
    assert "no kernel ran" in found.sheet().notes[0]


# ---- the byte floor -----------------------------------------------------------------------------


class NoWeights(Weights):
    """Tensors of the right shapes and types, in no memory; MXFP4 as `fp4.prepack` stores it."""

    def stored(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    def mxfp4(self, name: str, experts: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.empty(experts, n, k // 2, dtype=torch.uint8, device="meta")
        return codes, torch.empty(experts, n, k // 32, dtype=torch.uint8, device="meta")


@pytest.mark.parametrize(("batch", "rate"), [(1, 1148), (8, 3673), (64, 19029)])
def test_floors_of_gpt_oss_20b(batch: int, rate: float) -> None:
    """Tokens a second that a copy's bandwidth allows, computed by hand from the model's sizes."""
    weights = NoWeights("meta", torch.bfloat16)
    whole = moe.build(moe.SIZES["gpt-oss-20b"], weights, moe.on("cpu"))
    needed = step_bytes(whole, batch, 1024, torch.bfloat16)
    assert batch * bandwidth_of(gpu.find("h200")) / needed == pytest.approx(rate, rel=5e-3)
    assert bandwidth_of(gpu.find("h100")) == gpu.find("h100").bandwidth


def test_bytes_of_a_small_dense_model_are_counted_one_by_one() -> None:
    small = moe.random_model("small-llama", "cpu")  # float32: 4 bytes
    hidden, heads, kv_heads, dim, inter, vocab, layers = 64, 4, 2, 64, 96, 256, 2
    projections = (heads + 2 * kv_heads) * dim * hidden + heads * dim * hidden
    layer = projections + 3 * inter * hidden + 2 * hidden
    cached = layers * 2 * kv_heads * dim * 100
    expected = layers * layer + vocab * hidden + hidden + 3 * hidden + 3 * cached
    assert step_bytes(small, 3, 100, torch.float32) == 4 * expected
    by_bytes = step_bytes(small, 3, 100, torch.float8_e4m3fn)
    assert by_bytes == 4 * expected - 3 * 3 * cached


def test_a_window_limits_what_is_read(model: moe.Decoder) -> None:
    sizes = [step_bytes(model, 1, context, torch.float32) for context in (24, 25, 26)]
    row = 2 * 2 * 64 * 4  # keys and values of one token in one layer; the other layer has a window
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == row


# ---- recording ----------------------------------------------------------------------------------


def test_steps_are_recorded_on_a_cpu(model: moe.Decoder, tmp_path: Path) -> None:
    served, trace = engine(model), tmp_path / "trace.json.gz"
    found = profile_decoding(served, prompts(2, 30, 256, 0), trace, num_steps=4)
    assert not served.has_work and served.statistics().requests_running == 0
    served.check_integrity()
    assert (found.batch, found.steps, found.kernels) == (2, 4, ())
    assert 30 < found.context <= 40
    assert all(us > 0 for us in found.phases.values())
    assert sum(found.phases.values()) <= found.step_us
    dtype = torch.float32
    assert found.floor_bytes == step_bytes(model, 2, found.context, dtype)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    (window,) = (e for e in events if e["name"] == WINDOW)
    layers = [e for e in events if e["name"] == "layer 1"
              and window["ts"] <= e["ts"] <= window["ts"] + window["dur"]]  # fmt: skip
    assert len(layers) == 4


def test_requests_that_would_end_are_refused_and_leave_nothing(
    model: moe.Decoder, tmp_path: Path
) -> None:
    served = engine(model, context=36)
    with pytest.raises(InvalidArgument, match="36 tokens is too short to profile"):
        profile_decoding(served, prompts(2, 30, 256, 0), tmp_path / "trace.json", num_steps=16)
    assert not served.has_work
    served.check_integrity()
    with pytest.raises(KernelcatError, match="cannot be written"):
        profile_decoding(served, prompts(1, 5, 256, 0), tmp_path / "no" / "trace.json")


def test_generate_records_the_steps_of_its_prompt(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    done = CliRunner().invoke(main, [
        "moe", "generate", "small-llama", "Hi", "--random-weights", "--device", "cpu",
        "--max-tokens", "8", "--profile", str(trace),
    ])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "phase of the host" in done.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e["name"] == "schedule" for e in events) == 2 + 4  # two before those that count


def test_bench_records_each_batch_to_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, str]] = []

    def recorded(engine: Engine, texts: list[list[int]], trace: Path) -> StepProfile:
        asked.append((len(texts), len(texts[0]), trace.name))
        return profile(batch=len(texts))

    monkeypatch.setattr("kernelcat.moe.parallel.expert_stepping.profile_steps", recorded)
    command = [
        "moe", "bench", "small-llama", "--random-weights", "--device", "cpu", "--context", "10",
        "--tokens", "3", "--rounds", "1", "--requests", "0", "--profile", str(tmp_path / "t.json"),
    ]  # fmt: skip
    done = CliRunner().invoke(main, [*command, "--batches", "1,2", "--json"])
    assert done.exit_code == 0, done.output
    assert asked == [(1, 10, "t-1.json"), (2, 10, "t-2.json")]
    found = json.loads(done.stdout)["profiles"]
    assert [one["batch"] for one in found] == [1, 2] and found[0]["kernels"][0]["name"] == "gemm"
    done = CliRunner().invoke(main, [*command, "--batches", "2"])
    assert asked[-1] == (2, 10, "t.json") and "one decode step, batch 2" in done.stdout


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["bench", "--url", "http://127.0.0.1:1", "--profile", "t.json"], "not for --url"),
        (["generate", "small-llama", "Hi", "--random-weights", "--device", "cpu", "--profile",
          "t.json", "--max-tokens", "4"], "--max-tokens of at least 5"),
    ],
)  # fmt: skip
def test_profiles_that_cannot_be_made_are_refused(command: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["moe", *command])
    assert done.exit_code == 1 and message in done.output
