"""Engines on several ranks: processes that write the same tokens as one, and what happens when one
of them fails."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import openai
import pytest
import torch
from click.testing import CliRunner
from moe_followers import ANSWER_S, LIMITS, followers_below
from moe_server import running_server, wait_until

from kernelcat.cli import main
from kernelcat.errors import InvalidArgument, RankFailed
from kernelcat.moe.engine.engine import Engine, EngineError
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.model import Decoder
from kernelcat.moe.parallel import followers, host_exchange
from kernelcat.moe.parallel.messages import Build
from kernelcat.moe.serve.engine_process import EngineProcess
from kernelcat.moe.source import ModelSource

SETTINGS = EngineSettings(LIMITS, 16, cpu_cache_bytes=8 << 20)


def source(name: str, tp: int) -> ModelSource:
    return ModelSource(f"small-{name}", "cpu", has_random_weights=True, tp=tp)


@contextmanager
def opened(name: str, tp: int) -> Iterator[Decoder]:
    """A model whose other ranks are processes, until the context ends."""
    model = source(name, tp).open()
    assert model.exchange is not None
    try:
        yield model
    finally:
        model.exchange.close()


def written(engine: Engine) -> list[list[int]]:
    """The tokens of greedy requests and of such that draw.

    Two prompts share a prefix of 64 tokens, and two have more tokens than a step.
    """
    generator = torch.Generator().manual_seed(3)
    first, other = (torch.randint(256, (n,), generator=generator).tolist() for n in (70, 9))
    asked = (
        (first, SamplingParameters(temperature=0, max_tokens=6)),
        (other, SamplingParameters(temperature=0, max_tokens=6, logprobs=2)),
        (other, SamplingParameters(temperature=1, top_p=0.9, seed=5, max_tokens=6)),
        ([*first[:64], 1], SamplingParameters(temperature=0.8, top_k=40, seed=6, max_tokens=6,
                                              repetition_penalty=1.3)),
    )  # fmt: skip
    requests = [engine.submit(*each) for each in asked[:3]]
    run(engine)
    requests.append(engine.submit(*asked[3]))
    run(engine)
    return [request.tokens[len(request.prompt) :] for request in requests]


def run(engine: Engine) -> None:
    while engine.has_work:
        for output in engine.step():
            assert not output.error, output.error


@pytest.mark.parametrize(
    ("name", "tp", "num_drafts"),
    [("gpt-oss", 2, 2), ("qwen3-moe", 2, 0), ("deepseek-v3", 2, 0), ("llama", 4, 0)],
)
def test_several_ranks_write_the_tokens_of_one(name: str, tp: int, num_drafts: int) -> None:
    """With chunks of prompts, a prefix cache, overlapping steps, draws with seeds; with drafts."""
    settings = EngineSettings(
        LIMITS, 16, cpu_cache_bytes=8 << 20, is_overlapped=True,
        speculation=Speculation(num_drafts) if num_drafts else None,
    )  # fmt: skip
    expected = written(Engine(source(name, 1).open(), settings))
    with opened(name, tp) as model:
        engine = Engine(model, settings)
        assert written(engine) == expected
        engine.check_integrity()
        assert engine.statistics().cached_tokens_total >= 64
        engine.close()
        assert written(Engine(model, SETTINGS)) == expected  # the model stays


@pytest.mark.parametrize(
    ("number", "says"),
    [(signal.SIGKILL, "rank 1 has ended"), (signal.SIGSTOP, "rank 1 did not answer in time")],
)
def test_a_rank_that_fails_ends_all_requests(
    number: signal.Signals, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("llama", 2) as model:
        engine = Engine(model, SETTINGS)
        requests = [engine.submit([1, 2, i], SamplingParameters(max_tokens=200)) for i in range(6)]
        for _ in range(4):
            assert not any(output.error for output in engine.step())
        monkeypatch.setattr(host_exchange, "ANSWER_S", 1.0)
        [follower] = followers_below(os.getpid())
        os.kill(follower, number)
        start, outputs = time.monotonic(), []
        while engine.has_work:
            outputs += engine.step()
        assert time.monotonic() - start < ANSWER_S
        failed = [output for output in outputs if output.error]
        assert {output.request_id for output in failed} == {request.id for request in requests}
        assert all(output.finish_reason is FinishReason.ERROR for output in failed)
        assert all(says in output.error for output in failed)
        assert not engine.is_healthy
        with pytest.raises(EngineError, match=says):
            engine.submit([1])
        engine.close()


def test_a_rank_that_ended_between_requests_is_found_by_the_next_one() -> None:
    with opened("llama", 2) as model:
        engine = Engine(model, SETTINGS)
        [follower] = followers_below(os.getpid())
        os.kill(follower, signal.SIGKILL)
        time.sleep(0.2)
        engine.submit([1, 2, 3])
        (output,) = engine.step()
        assert output.finish_reason is FinishReason.ERROR and "rank 1 has ended" in output.error


def test_a_rank_that_does_not_come_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "FOLLOWER", "kernelcat.nothing")
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 has ended: exit status 1"):
        source("llama", 2).open()
    assert time.monotonic() - start < ANSWER_S


def test_a_rank_that_cannot_build_says_why() -> None:
    """What a rank says is the error of rank 0 too."""
    with opened("llama", 2) as model:
        assert model.exchange is not None and model.exchange.followers is not None
        model.exchange.tell(Build(replace(SETTINGS, num_pages=(9, 9, 9))))
        with pytest.raises(
            RankFailed, match=r"rank 1: .*num_pages=\(9, 9, 9\) must have 1 numbers"
        ):
            Engine(model, SETTINGS)


def test_a_server_answers_when_a_rank_has_died() -> None:
    process = EngineProcess(source("llama", 2), SETTINGS)
    with running_server(process, source("llama", 2).tokenizer()) as (url, server):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model="tiny", prompt="a", max_tokens=250, stream=True)
        next(iter(stream))
        [follower] = followers_below(process.process_id)
        os.kill(follower, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(openai.APIError, match="rank 1 has ended"):
            list(stream)
        assert time.monotonic() - start < ANSWER_S
        wait_until(lambda: server.has_failed)


def test_the_verbs_take_ranks() -> None:
    command = ["moe", "generate", "small-llama", "Hi", "--random-weights", "--device", "cpu",
               "--max-tokens", "4", "--json"]  # fmt: skip
    texts = [json.loads(CliRunner().invoke(main, [*command, *more]).stdout)["text"]
             for more in ([], ["--tp", "2"])]  # fmt: skip
    assert texts[0] == texts[1]
    refused = CliRunner().invoke(main, [*command, "--tp", "3"])
    assert refused.exit_code == 1 and "cannot be divided among 3 ranks" in refused.output


def test_what_ranks_are_not_for_is_told() -> None:
    with pytest.raises(InvalidArgument, match="tp=0 must be positive"):
        ModelSource.find("small-llama", "cpu", has_random_weights=True, tp=0)
    with pytest.raises(InvalidArgument, match="decoded experts are for one rank"):
        source("gpt-oss", 2).open(dense_experts=True)
