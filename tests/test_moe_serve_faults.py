"""The HTTP server when something goes wrong: every request is answered, and no page leaks."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest
from click.testing import CliRunner
from moe_server import DEADLINE, MODEL, VOCAB, served, tiny_engine, tiny_tokenizer, wait_until

from kernelcat.cli import main
from kernelcat.errors import LaunchError
from kernelcat.moe.serve.load import Target, run
from kernelcat.moe.serving_metrics import measure
from kernelcat.moe.workload import Workload

LONG = {"model": MODEL, "prompt": "a", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
SHORT = {**LONG, "max_tokens": 2}


@pytest.fixture
def running(request):
    """A server; ``request.param`` are the engine's limits."""
    tokenizer = tiny_tokenizer()
    engine = tiny_engine(tokenizer.decode, **getattr(request, "param", {}))
    with served(engine, tokenizer, api_keys=("secret", "other"), grace=0.2) as found:
        yield found


@pytest.fixture
def client(running):
    with running.client(api_key="secret") as made:
        yield made


def test_a_wrong_key_is_refused(running, client):
    assert client.models.list().data and running.client(api_key="other").models.list().data
    for key in ("secre", "secret2", "sécret"):
        with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)) as caught:
            running.client(api_key=key).completions.create(**SHORT)
        if isinstance(caught.value, openai.AuthenticationError):
            assert caught.value.code == "invalid_api_key" and key not in caught.value.message
    raw = client._client
    assert raw.post(f"{running.url}/v1/completions", json=SHORT).status_code == 401
    assert raw.get(f"{running.url}/health").status_code == 200  # a probe has no key


def test_a_client_that_goes_away_cancels_its_request(running, client):
    stream = client.completions.create(**LONG, stream=True, n=2)
    next(iter(stream))
    assert running.engine.has_work
    stream.close()
    running.check_idle()
    with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) as raw:
        body = json.dumps({**LONG, "extra_body": None, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n"
        raw.sendall(f"{head}authorization: Bearer secret\r\n\r\n".encode() + body)
        wait_until(lambda: running.engine.has_work)
    running.check_idle()
    assert running.engine.statistics().output_tokens_total < 600, "none has written all its tokens"
    text = client._client.get(f"{running.url}/metrics").text
    assert 'kernelcat_broken_streams_total{reason="client gone"} 1.0' in text
    assert 'kernelcat_responses_total{endpoint="/v1/completions",status="499"} 1.0' in text


@pytest.mark.parametrize("running", [{"max_running": 1, "max_waiting": 2}], indirect=True)
def test_a_full_queue_is_an_answer(running, client):
    streams = [client.completions.create(**LONG, stream=True)]
    next(iter(streams[0]))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(client.completions.create, **SHORT) for _ in range(2)]
        wait_until(lambda: running.engine.statistics().requests_waiting == 2)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError, match="2 requests wait") as caught:
                client.completions.create(**SHORT, stream=stream)
            assert caught.value.code == "queue_full"
            assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.RateLimitError):  # all choices, or none
            client.completions.create(**SHORT, n=3)
        streams[0].close()
        assert [answer.result().usage.completion_tokens for answer in waiting] == [2, 2]
    running.check_idle()


@pytest.mark.parametrize(
    "running", [{"max_running": 64, "max_waiting": 1000, "step_tokens": 512}], indirect=True
)
def test_a_thousand_requests_at_once_are_all_answered(running):
    arrivals = Workload(1000, (3, 12), (1, 2)).arrivals(VOCAB)
    target = Target.find(running.url, api_key="secret")
    assert (target.model, target.vocab_size) == (MODEL, VOCAB)
    found = measure(asyncio.run(run(target, arrivals)))
    assert (found.num_complete, found.errors) == (1000, {})
    assert found.num_output_tokens == sum(arrival.num_output for arrival in arrivals)
    assert found.num_prompt_tokens == sum(len(arrival.prompt) for arrival in arrivals)
    assert 0 < found.ttft_ms.p50 <= found.ttft_ms.max and found.tpot_ms.count < 1000
    running.check_idle()


@pytest.mark.parametrize("running", [{"num_pages": 13}], indirect=True)
def test_a_full_cache_makes_requests_wait_and_no_more(running, client):
    """The cache has 192 tokens, and 16 requests of 13 to 52 tokens each run or wait for pages."""
    expected = client.completions.create(**{**LONG, "max_tokens": 40}, temperature=0)
    arrivals = Workload(48, (3, 12), (10, 40)).arrivals(VOCAB)
    found = measure(asyncio.run(run(Target.find(running.url, api_key="secret"), arrivals)))
    assert (found.num_complete, found.errors) == (48, {})
    assert found.num_output_tokens == sum(arrival.num_output for arrival in arrivals)
    assert running.engine.statistics().preemptions_total > 0
    with pytest.raises(openai.BadRequestError, match="the cache has room for 193"):
        client.completions.create(**LONG)
    answer = client.completions.create(**{**LONG, "max_tokens": 40}, temperature=0)
    assert answer.choices[0].text == expected.choices[0].text
    running.check_idle()


def test_the_load_names_what_fails(running):
    arrivals = Workload(2, (3, 3), (4, 4), rate=100.0).arrivals(VOCAB)
    for target, error in (
        (Target(running.url, "other", VOCAB, "secret"), "HTTP status 404"),
        (Target(running.url, MODEL, VOCAB, "wrong"), "HTTP status 401"),
        (Target("http://127.0.0.1:1", MODEL, VOCAB), "connection failed: Connection refused"),
    ):
        found = measure(asyncio.run(run(target, arrivals)))
        assert (found.num_complete, found.errors) == (0, {error: 2})


def test_a_step_that_fails_fails_its_requests_only(running, client):
    model, calls = running.engine.model, []
    embedding = model.ops.embedding

    def breaks_once(*args, **named):
        calls.append(args)
        if len(calls) == 4:
            raise LaunchError("an illegal instruction was encountered")
        return embedding(*args, **named)

    expected = client.completions.create(**{**LONG, "max_tokens": 20}, temperature=0)
    model.ops = replace(model.ops, embedding=breaks_once)
    with pytest.raises(openai.InternalServerError, match="illegal instruction") as caught:
        client.completions.create(**LONG)
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    running.check_idle()
    calls.clear()
    with pytest.raises(openai.APIError, match="illegal instruction"):  # in the middle of a stream
        for event in client.completions.create(**LONG, stream=True):
            assert event.choices[0].finish_reason is None
    running.check_idle()
    answer = client.completions.create(**{**LONG, "max_tokens": 20}, temperature=0)
    assert answer.choices[0].text == expected.choices[0].text
    assert client._client.get(f"{running.url}/health").status_code == 200


def test_a_server_without_engine_ends(running, client):
    stream = client.completions.create(**LONG, stream=True)
    next(iter(stream))
    running.service.engine = Lost(running.service.engine)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    wait_until(lambda: running.server.has_failed)
    running.check_idle()


class Lost:
    """An engine whose device is lost."""

    is_healthy = False

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)


SERVE = ["moe", "serve", "small-llama", "--random-weights", "--device", "cpu", "--json"]


def metrics_of(url):
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as answer:
        return answer.read().decode()


def test_sigterm_under_load_answers_every_request():
    """Requests that end within the grace time are complete, all others get an error."""
    command = [sys.executable, "-m", "kernelcat", *SERVE, "--port", "0", "--grace", "1"]
    with subprocess.Popen(
        [*command, "--max-running", "4", "--context", "500", "--cpu-cache", "8000000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            url = json.loads("".join(process.stdout.readline() for _ in range(4)))["url"]
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE)
            results, started = [], threading.Semaphore(0)

            def ask(is_stream, **fields):
                body = {**LONG, "model": "small-llama", **fields}
                try:
                    answer = client.completions.create(**body, stream=is_stream)
                    if is_stream:
                        for _ in answer:
                            started.release()
                    results.append("complete")
                except openai.APIError as error:
                    results.append(error.body["code"] if error.body else repr(error))

            loads = [(True, 480), (True, 480), (False, 480), (True, 30), *[(False, 480)] * 12]
            threads = [
                threading.Thread(target=ask, args=(is_stream,), kwargs={"max_tokens": count})
                for is_stream, count in loads
            ]
            for thread in threads:
                thread.start()
            assert started.acquire(timeout=DEADLINE)
            wait_until(lambda: f"kernelcat_requests_total {len(loads)}.0" in metrics_of(url))
            process.send_signal(signal.SIGTERM)
            for thread in threads:
                thread.join(DEADLINE)
            assert process.wait(DEADLINE) == 0, process.stderr.read()
            assert len(results) == len(threads) and set(results) <= {"complete", "shutting_down"}
            assert results.count("shutting_down") >= 3
            with pytest.raises(openai.APIConnectionError):
                client.models.list()
        finally:
            process.kill()


def test_the_verb_bench_prints_what_a_load_measured(running):
    options = ["--url", running.url, "--requests", "3", "--input", "4,8", "--output", "5"]
    command = ["moe", "bench", *options, "--api-key", "secret", "--slo", "latency=60000"]
    found = CliRunner().invoke(main, [*command, "--json"])
    content = json.loads(found.stdout)
    [load] = content["loads"]
    metrics = load["metrics"]
    assert (content["model"], metrics["num_complete"], metrics["num_output_tokens"]) == (
        MODEL, 3, 15,
    )  # fmt: skip
    assert metrics["goodput"] == metrics["request_throughput"] > 0
    assert load["workload"]["output_range"] == [5, 5] and metrics["tpot_ms"]["count"] == 3
    assert "3 of 3 requests" in CliRunner().invoke(main, command).output
    refused = CliRunner().invoke(main, [*command, "--input", "x"])
    assert refused.exit_code == 1 and "is no range" in refused.output
    wrong = CliRunner().invoke(main, [*command[:3], "http://127.0.0.1:1"])
    assert wrong.exit_code == 1 and "Connection refused" in wrong.output
