"""Engines on several ranks: processes that write the same tokens as one, and what happens when one
of them fails."""

from __future__ import annotations

import pytest
import torch

from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.source import ModelSource

LIMITS = Limits(step_tokens=48, max_running=4, max_waiting=16, context=256)
SETTINGS = EngineSettings(LIMITS, 16, cpu_cache_bytes=8 << 20)


def prompts() -> list[list[int]]:
    """Two prompts share a prefix of 64 tokens; one has more tokens than a step."""
    generator = torch.Generator().manual_seed(3)
    first, last = (torch.randint(256, (n,), generator=generator).tolist() for n in (70, 9))
    return [first, last, [*first[:64], 1, 2, 3]]


SAMPLED = (
    SamplingParameters(temperature=0, max_tokens=8),
    SamplingParameters(temperature=1, top_p=0.9, seed=5, max_tokens=8),
    SamplingParameters(temperature=0.7, top_k=40, seed=6, repetition_penalty=1.3, max_tokens=8),
    SamplingParameters(temperature=0, max_tokens=8, logprobs=2),
)


def written(engine: Engine) -> list[list[int]]:
    """The tokens of greedy requests, then of requests that draw; all start at once, twice."""
    tokens = []
    for parameters in SAMPLED:
        requests = [engine.submit(prompt, parameters) for prompt in prompts()]
        while engine.has_work:
            for output in engine.step():
                assert not output.error, output.error
        tokens += [request.tokens[len(request.prompt) :] for request in requests]
    return tokens


@pytest.mark.parametrize(
    ("name", "tp"),
    [("gpt-oss", 2), ("qwen3-moe", 2), ("deepseek-v3", 2), ("llama", 4), ("smollm2", 2)],
)
def test_several_ranks_write_the_tokens_of_one(name: str, tp: int) -> None:
    """With chunks of prompts, a prefix cache, drafts, draws with seeds and log-probabilities."""
    settings = EngineSettings(
        LIMITS, 16, cpu_cache_bytes=8 << 20, speculation=Speculation(2), is_overlapped=True
    )
    one = ModelSource(f"small-{name}", "cpu", has_random_weights=True)
    model = ModelSource(f"small-{name}", "cpu", has_random_weights=True, tp=tp).open()
    try:
        engine = Engine(model, settings)
        found = written(engine)
        engine.check_integrity()
        assert engine.statistics().cached_tokens_total > 0
        engine.close()
        assert found == written(Engine(one.open(), settings))
    finally:
        assert model.exchange is not None
        model.exchange.close()
