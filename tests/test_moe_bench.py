"""Times of the engine: what is counted, on a small model, a CPU and a clock of our own."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from moe_models import NAMES
from torch.utils.flop_counter import FlopCounterMode

from kernelcat import moe
from kernelcat.cli import main
from kernelcat.errors import InvalidArgument
from kernelcat.moe import bench, peers
from kernelcat.moe.bench import Decoding, Round, _round, time_decoding, time_load
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.peers import load_transformers, time_transformers
from kernelcat.moe.prefill import active_elements, prefill_flops
from kernelcat.moe.serving_metrics import Slo
from kernelcat.moe.workload import Workload
from kernelcat.report.engine_sheets import fetch_sheet
from kernelcat.store.model_results import ModelResult


@pytest.fixture(scope="module")
def model() -> moe.Decoder:
    return moe.random_model("small-llama", "cpu")


def engine(model: moe.Decoder, **limits: int) -> Engine:
    sizes = Limits(**{"step_tokens": 64, "max_running": 4, "context": 128, **limits})
    return Engine(model, EngineSettings(sizes, page_size=16, num_pages=(40,)))


class Clock:
    """A clock that goes on by a second for each step of ``served``, and while somebody sleeps."""

    def __init__(self, served: Engine) -> None:
        self.now, self._step = 100.0, served.step
        served.step = self._tick

    def _tick(self):
        self.now += 1.0
        return self._step()

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_load_is_measured_from_the_time_at_which_requests_are_due(model: moe.Decoder) -> None:
    served = engine(model, max_running=1, step_tokens=8)
    clock = Clock(served)
    workload = Workload(3, (6, 6), (4, 4), rate=0.5)
    due = [arrival.time for arrival in workload.arrivals(256)]
    metrics = time_load(served, workload, Slo(ttft_ms=1500), clock.read, clock.sleep)
    # one request at a time; a request takes a step for each of its 4 tokens
    start = ends = 0.0
    firsts = []
    for at in due:
        start = max(ends, at)
        firsts.append(start + 1 - at)
        ends = start + 4
    assert metrics.num_complete == 3 and metrics.num_output_tokens == 12
    assert metrics.num_prompt_tokens == 18
    assert metrics.ttft_ms is not None and metrics.tpot_ms is not None
    assert metrics.ttft_ms.max == pytest.approx(1e3 * max(firsts), abs=1e3)
    assert metrics.tpot_ms.p50 == pytest.approx(1000)
    assert metrics.duration_s == pytest.approx(ends, abs=1)
    good = sum(first <= 1.5 for first in firsts)
    assert metrics.goodput == pytest.approx(good / metrics.duration_s)


def test_refused_and_failed_requests_are_counted(model: moe.Decoder) -> None:
    served = engine(model, max_waiting=2)
    metrics = time_load(served, Workload(5, (6, 6), (4, 4)))
    assert metrics.num_complete == 2
    assert sum(metrics.errors.values()) == 3 and "requests wait" in next(iter(metrics.errors))
    served = engine(model)
    forward, calls = served._runner._forward, []

    def failing(host) -> torch.Tensor:
        calls.append(host)
        if len(calls) == 2:
            raise RuntimeError("a kernel failed")
        return forward(host)

    served._runner._forward = failing
    metrics = time_load(served, Workload(6, (6, 6), (4, 4)))
    assert metrics.num_complete == 2 and metrics.errors == {"RuntimeError: a kernel failed": 4}


def test_decoding_is_timed_while_all_requests_write(model: moe.Decoder) -> None:
    rounds = [Round(0.5, 2.0, 80), Round(0.25, 1.0, 80), Round(1.0, 4.0, 80)]
    found = Decoding.of("kernelcat", 8, 100, 11, rounds)
    assert found.rounds == [40, 80, 20] and found.tokens_per_second == 40
    assert found.step_ms == 200 and found.prefill_ms == 500
    served = engine(model)
    found = time_decoding(served, 3, 40, 5, num_rounds=1)
    assert found.batch == 3 and found.tokens_per_second > 0
    totals = served.statistics()
    assert totals.output_tokens_total == 2 * 3 * 5 and totals.cached_tokens_total == 0
    # prompts of 40 tokens are computed one after another, and the first request writes meanwhile:
    # when the third one has a token, the first one has four, and four steps are left
    found = _round(engine(model, step_tokens=40), 3, 40, 8, seed=0)
    assert found.num_decoded == 4 * 3
    with pytest.raises(InvalidArgument, match="2 tokens are too few"):
        _round(engine(model, step_tokens=40), 3, 40, 2, seed=0)
    with pytest.raises(InvalidArgument, match="Take at least 5"):
        time_decoding(engine(model, step_tokens=40), 3, 40, 4, num_rounds=1)
    assert time_decoding(engine(model, step_tokens=40), 3, 40, 5, num_rounds=1).num_tokens == 5


def test_the_command_times_decoding_loads_and_a_peer(tmp_path: Path) -> None:
    command = [
        "moe", "bench", "small-llama", "--random-weights", "--device", "cpu", "--batches", "1,2",
        "--context", "20", "--tokens", "3", "--rounds", "1", "--requests", "4", "--input", "5,9",
        "--output", "3", "--rate", "inf", "--rate", "200", "--peer", "transformers",
        "--slo", "latency=60000", "--prefill", "30",
    ]  # fmt: skip
    out = tmp_path / "bench.json"
    done = CliRunner().invoke(main, [*command, "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert json.loads(out.read_text()) == result and result["failed"] == {}
    assert [(r["engine"], r["batch"]) for r in result["decoding"]] == [
        ("transformers", 1), ("transformers", 2), ("kernelcat", 1), ("kernelcat", 2),
    ]  # fmt: skip
    prefill = result["prefill"]
    assert prefill["num_tokens"] == 30 and prefill["matrix_size"] == 512
    assert prefill["share"] == pytest.approx(prefill["tflops"] / prefill["matrix_tflops"])
    config = moe.SIZES["small-llama"]
    assert prefill["tflops"] * prefill["ms"] == pytest.approx(prefill_flops(config, 30) / 1e9)
    for load, rate in zip(result["loads"], (None, 200), strict=True):
        assert load["workload"]["rate"] == rate
        metrics = load["metrics"]
        assert metrics["num_complete"] == 4 and metrics["num_output_tokens"] == 12
        assert metrics["goodput"] == metrics["request_throughput"] > 0
    told = done.stderr
    for one in result["decoding"]:
        rate = f"{one['tokens_per_second']:,.1f} tokens/s"
        assert f"{one['engine']}, batch {one['batch']}, context 20: {rate}" in told
    assert "prefill of 30 tokens" in told and "200 requests/s: 4 of 4 requests" in told
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    for word in (
        "transformers",
        "all at once",
        "200 requests/s",
        "ttft",
        "goodput",
        "prefill of 30 tokens",
    ):
        assert word in done.stdout


def test_a_bench_that_is_interrupted_has_told_what_it_measured(monkeypatch, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "time_load", interrupted)
    done = CliRunner().invoke(main, [
        "moe", "bench", "small-llama", "--random-weights", "--device", "cpu", "--batches", "2",
        "--context", "8", "--tokens", "3", "--rounds", "1", "--peer", "transformers",
        "--out", str(out),
    ])  # fmt: skip
    assert done.exit_code == 1 and not done.stdout
    kept = json.loads(out.read_text())
    assert [one["engine"] for one in kept["decoding"]] == ["transformers", "kernelcat"]
    assert re.search(r"transformers, batch 2, context 8: \S+ tokens/s", done.stderr)
    assert re.search(r"kernelcat, batch 2, context 8: \S+ tokens/s", done.stderr)


def test_a_peer_that_fails_is_told_and_the_rest_goes_on(monkeypatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(peers, "time_transformers", full)
    done = CliRunner().invoke(main, [
        "moe", "bench", "small-llama", "--random-weights", "--device", "cpu", "--batches", "2",
        "--context", "8", "--tokens", "3", "--rounds", "1", "--peer", "transformers",
        "--requests", "0", "--json",
    ])  # fmt: skip
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["failed"] == {"transformers": "OutOfMemoryError: CUDA out of memory"}
    assert [one["engine"] for one in result["decoding"]] == ["kernelcat"]
    assert "transformers has failed: OutOfMemoryError" in done.stderr


def test_a_fetch_is_timed_beside_its_recomputation(tmp_path: Path) -> None:
    command = [
        "moe", "bench", "small-gpt-oss", "--random-weights", "--device", "cpu", "--batches", "1",
        "--context", "9", "--tokens", "2", "--rounds", "1", "--requests", "0", "--step-tokens",
        "256", "--fetch",
    ]  # fmt: skip
    out = tmp_path / "fetch.json"
    done = CliRunner().invoke(
        main, [*command, "128", "--host-cache", "0.1", "--out", str(out), "--json"]
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text())
    fetch = result["fetch"]
    layers = moe.SIZES["small-gpt-oss"].num_hidden_layers
    config = moe.SIZES["small-gpt-oss"]
    block = 64 * config.num_key_value_heads * config.head_dim * 2 * 4
    # two blocks of the layers without a window, and one of those with a window of 24 tokens
    assert fetch["num_bytes"] == layers // 2 * 3 * block and fetch["num_tokens"] == 128
    assert fetch["bandwidth"] > 0 and min(fetch["shared_ms"], fetch["fetched_ms"]) > 0
    assert fetch["speedup"] == pytest.approx(fetch["recomputed_ms"] / fetch["fetched_ms"])
    assert "first token after a prefix of 128 tokens" in done.stderr
    kept = ModelResult.of("h200", "c", "2026-11-26", result).measured["fetch"]
    assert fetch_sheet("", kept).lines[0][0] == "128 tokens"
    for options, message in (
        (["128", "--host-cache", "0.0005"], "may be too small"),
        (["100", "--host-cache", "0.1"], "must be a multiple of 64"),
    ):
        done = CliRunner().invoke(main, [*command, *options])
        assert done.exit_code == 1 and message in done.output, done.output


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13), ("deepseek-v3", 37), ("mixtral-8x7b", 12.9)],
)
def test_active_elements_are_those_of_the_model_cards(name: str, billions: float) -> None:
    """gpt-oss's cards count the head and no embedding, the others both."""
    config = moe.SIZES[name]
    tables = 1 if "oss" in name else 2
    found = active_elements(config) + tables * config.vocab_size * config.hidden_size
    assert found / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("name", ("llama", "qwen3-moe", "mixtral", "deepseek-v3"))
def test_operations_of_a_prefill_are_those_that_torch_counts(name: str) -> None:
    """transformers computes scores of all pairs, and latent attention as it is defined."""
    config, length = moe.SIZES[f"small-{name}"], 20
    theirs = load_transformers(config, None, "cpu")
    theirs.set_attn_implementation("eager")
    if name != "llama":
        theirs.set_experts_implementation("eager")  # grouped products are not counted
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        theirs(torch.zeros(1, length, dtype=torch.long), logits_to_keep=1)
    counts = counter.get_flop_counts()["Global"]
    head = config.vocab_size * config.hidden_size
    products = 2 * (length * active_elements(config) + head)
    assert counts[torch.ops.aten.mm] == products
    attention = prefill_flops(config, length) - products
    assert counts[torch.ops.aten.bmm] * (length + 1) == attention * 2 * length


def test_a_window_limits_what_a_query_sees() -> None:
    """Half of gpt-oss' layers have windows of 24 tokens: 1 + ... + 24 pairs, then 24 a token."""
    config = moe.SIZES["small-gpt-oss"]
    one_token = prefill_flops(config, 1)
    head = 2 * config.vocab_size * config.hidden_size
    per_pair = 2 * 2 * 4 * 64
    per_token = one_token - head - 2 * per_pair
    pairs = 100 * 101 // 2 + 24 * 25 // 2 + 76 * 24
    assert prefill_flops(config, 100) == head + 100 * per_token + pairs * per_pair


@pytest.mark.parametrize("name", NAMES)
def test_a_peer_with_random_weights_needs_no_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    config = moe.SIZES[f"small-{name}"]
    theirs = load_transformers(config, None, "cpu")
    [found] = time_transformers(theirs, config.vocab_size, [2], 9, 3, num_rounds=1)
    assert (found.engine, found.batch, len(found.rounds)) == ("transformers", 2, 1)
    layer = theirs.model.layers[-1]
    assert len(theirs.model.layers) == config.num_hidden_layers
    assert layer.self_attn.o_proj.weight.shape[0] == config.hidden_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "needs a MODEL"),
        (["small-llama", "--random-weights", "--peer", "x"], "--peer 'x' must be one of"),
        (["small-llama", "--batches", "1,0"], "must be positive numbers"),
        (["small-llama", "--input", "1,2,3"], "is no range"),
        (["small-llama", "--tokens", "1"], "at least 2"),
        (["small-llama", "--prefill", "-1"], "must be a number of tokens"),
        (["small-llama", "--fetch", "128"], "needs --host-cache"),
        (["small-llama", "--fetch", "-1", "--host-cache", "1"], "must be a number of tokens"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["moe", "bench", *options])
    assert done.exit_code == 1 and message in done.output
