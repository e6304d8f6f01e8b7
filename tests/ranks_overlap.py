"""A rank that times layers whose exchange overlaps with products: ``RANK RANKS FOLDER``.

Rank 0 prints milliseconds of each way, how far its result differs from the first way's, and when
the kernels of the first and of the last way began and ended.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from kernelcat import moe
from kernelcat.moe import blocks
from kernelcat.moe.ops import on
from kernelcat.moe.parallel.beside import Beside
from kernelcat.moe.parallel.device_exchange import DeviceExchange
from kernelcat.moe.parallel.exchange import Exchange
from kernelcat.moe.parallel.expert_layer import DividedExperts
from kernelcat.moe.parallel.expert_model import divide
from kernelcat.moe.parallel.halves import Halves
from kernelcat.moe.weights import ExpertShare

TOKENS, ROUNDS, RUNS = 8192, 9, 5
DECODED = 128
"""Tokens of a step that decodes."""
SLEEP_CYCLES = 20_000_000
"""About 10 ms, in which the host launches what is timed."""
Run = Callable[[], torch.Tensor]
Ways = dict[str, Run]
"""Ways to compute a layer, by name: the first has no overlap, the last one all of it."""


def in_halves(
    run: Callable[[Halves | None], torch.Tensor], exchange: Exchange, device: torch.device
) -> Ways:
    """Whole; halves on one stream; on two streams with all SMs for all, and with SMs shared out."""
    beside = Beside(device)
    ways = {
        "whole": None,
        "halves in sequence": Halves(exchange, Beside(torch.device("cpu")), 1, has_spare=False),
        "halves, no SMs spared": Halves(exchange, beside, 1, has_spare=False),
        "halves": Halves(exchange, beside, 1),
    }
    return {name: partial(run, halves) for name, halves in ways.items()}


def experts_of(exchange: Exchange, device: torch.device) -> Ways:
    """The experts of a layer of gpt-oss-20b, of which this rank holds its share."""
    sizes: Any = {"num_hidden_layers": 1, "vocab_size": 1024, "layer_types": ()}
    config = replace(moe.SIZES["gpt-oss-20b"], **sizes)
    share = ExpertShare(exchange.rank, exchange.ranks)
    model = moe.random_model(config, device, share=share)
    divide(model, exchange)
    x, a = torch.randn(2, TOKENS, config.hidden_size, device=device, dtype=model.dtype)
    logits = torch.randn(TOKENS, 32, device=device, dtype=model.dtype)
    experts = model.layers[0].experts

    def run(halves: Halves | None) -> torch.Tensor:
        assert model.divided is not None
        return model.divided(
            a, logits, experts, x, halves=halves, packing="tiles", top_k=4, renormalize=True,
            activation="swiglu_oai", act_dtype="bfloat16",
        )  # fmt: skip

    return in_halves(run, exchange, device)


def shared_expert_of(exchange: Exchange, device: torch.device) -> Ways:
    """A decoding step's experts of DeepSeek-V3, 8 on each rank, with the shared expert."""
    sizes: Any = {
        "num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 8 * exchange.ranks,
        "vocab_size": 1024, "num_attention_heads": 2,
    }  # fmt: skip
    config = replace(moe.SIZES["deepseek-v3"], **sizes)
    share = ExpertShare(exchange.rank, exchange.ranks)
    model = moe.random_model(config, device, share=share)
    divide(model, exchange)
    assert model.divided is not None
    x, a = torch.randn(2, DECODED, config.hidden_size, device=device, dtype=model.dtype)
    logits = torch.randn(DECODED, config.n_routed_experts, device=device, dtype=model.dtype)
    layer = model.layers[0]
    shared = partial(blocks.mlp, model, layer.mlp, a)

    def run(experts: DividedExperts) -> torch.Tensor:
        return experts(
            a, logits, layer.experts, x, shared, activation="swiglu", score="sigmoid", top_k=8,
            renormalize=True, groups=8, top_groups=4, scaling=2.5, act_dtype="bfloat16",
        )  # fmt: skip

    in_sequence = replace(model.divided, beside=Beside(torch.device("cpu")))
    return {
        "in sequence": partial(run, in_sequence), "beside the exchange": partial(run, model.divided)
    }  # fmt: skip


def projection_of(exchange: Exchange, device: torch.device, hidden: int, width: int) -> Ways:
    """An output projection of which this rank has ``width`` columns, with the norm after it."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16) / shape[-1] ** 0.5

    o = blocks.Output(drawn(hidden, width), drawn(hidden), drawn(hidden))
    attn = drawn(TOKENS, width)
    torch.manual_seed(1)  # the residual stream is that of all ranks
    x = drawn(TOKENS, hidden)

    def run(halves: Halves | None) -> torch.Tensor:
        model: Any = SimpleNamespace(
            ops=on("cuda"), config=SimpleNamespace(rms_norm_eps=1e-5), exchange=exchange,
            halves=halves,
        )  # fmt: skip
        return blocks.output(model, o, attn, x)[0]

    return in_halves(run, exchange, device)


def time_ms(run: Run, exchange: Exchange) -> float:
    """Milliseconds of a run, of several behind each other; ranks begin together."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    exchange.gather(None)
    torch.cuda._sleep(SLEEP_CYCLES)
    exchange.all_reduce(torch.zeros(1, 2880, device="cuda", dtype=torch.bfloat16))
    start.record()
    for _ in range(RUNS):
        run()
    end.record()
    torch.cuda.synchronize()
    exchange.check()
    return start.elapsed_time(end) / RUNS


def timeline(run: Run, exchange: Exchange) -> list[dict[str, Any]]:
    """The kernels of a run: name, stream, and microseconds at which each began and ended."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        exchange.gather(None)
        for _ in range(2):  # the second run is shown
            torch.cuda._sleep(SLEEP_CYCLES)
            exchange.all_reduce(torch.zeros(1, 2880, device="cuda", dtype=torch.bfloat16))
            run()
            torch.cuda.synchronize()
            exchange.check()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    sleeps = [i for i, kernel in enumerate(kernels) if "spin" in kernel["name"]]
    kernels = kernels[sleeps[-1] + 1 :]  # from the small all-reduce on
    origin = kernels[0]["ts"]
    return [
        {
            "name": kernel["name"],
            "stream": kernel["args"]["stream"],
            "start": kernel["ts"] - origin,
            "end": kernel["ts"] + kernel["dur"] - origin,
        }
        for kernel in kernels
    ]


def replayed(run: Run, exchange: Exchange) -> bool:
    """Whether a CUDA graph of a run, replayed twice, has the bits of the run."""
    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    is_equal = True
    for _ in range(2):
        y.zero_()
        exchange.gather(None)
        graph.replay()
        torch.cuda.synchronize()
        exchange.check()
        is_equal &= torch.equal(y, expected)
    return is_equal


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    exchange = DeviceExchange(rank, ranks, folder / "ranks", rank)
    layers = {
        "experts": experts_of(exchange, device),
        "shared expert": shared_expert_of(exchange, device),
        "projection 2880": projection_of(exchange, device, 2880, 4096 // ranks),
        "projection 7168": projection_of(exchange, device, 7168, 16384 // ranks),
    }
    exchange.all_reduce(torch.zeros(1, 2880, device="cuda", dtype=torch.bfloat16))
    results: dict[str, Any] = {}
    for name, ways in layers.items():
        made = {way: run().float() for way, run in ways.items()}
        first = next(iter(made.values()))
        errors = {way: float((y - first).norm() / first.norm()) for way, y in made.items()}
        results[name] = {"errors": errors}
    torch.cuda.synchronize()
    exchange.start()
    for name, ways in layers.items():
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, run in ways.items():
                times[way].append(time_ms(run, exchange))
        results[name]["times"] = {way: median(values) for way, values in times.items()}
        first_way, *_, last_way = ways
        results[name]["timelines"] = {
            way: timeline(ways[way], exchange) for way in (first_way, last_way)
        }
    for name, ways in layers.items():
        results[name]["is_replayed"] = replayed(list(ways.values())[-1], exchange)
    exchange.close()
    if rank == 0:
        print(json.dumps({"gpu": torch.cuda.get_device_name(), "layers": results}))


if __name__ == "__main__":
    main()
