"""What an engine refuses, and how the refusal reads."""

from __future__ import annotations

import pytest
from fake_model import VOCAB, FakeEngine, engine

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.blocks import LayerGroup
from kernelcat.moe.engine.limits import Limits, QueueFull
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason


def refused(served, prompt, **parameters):
    with pytest.raises(InvalidArgument) as caught:
        served.submit(prompt, "x", **parameters)
    assert not served.scheduler.has_work
    served.scheduler.check_integrity()
    return str(caught.value)


def test_a_prompt_longer_than_the_cache_is_refused():
    served = engine(num_pages=5, context=64)
    assert refused(served, [1] * 17) == (
        "a prompt of 17 tokens and one token to write are 18 tokens, and the cache has room for "
        "17: shorten the prompt or lower max_tokens"
    )
    request = served.submit([1] * 16)
    served.finish()
    served.check(request)
    assert (request.num_written, request.finish_reason) == (1, FinishReason.LENGTH)


def test_a_prompt_longer_than_the_context_is_refused():
    served = engine(context=20)
    message = "and the context has room for 20"
    assert message in refused(served, [1] * 20)
    assert message in refused(served, [1] * 10, max_tokens=11)
    request = served.submit([1] * 10)  # as many as the context has room for
    served.finish()
    assert request.num_written == 10


@pytest.mark.parametrize("prompt", [[], [-1], [VOCAB]])
def test_prompts_that_no_embedding_serves_are_refused(prompt):
    assert "must" in refused(engine(vocab_size=VOCAB), prompt)


def test_an_id_is_used_once_at_a_time():
    served = engine()
    request = served.submit([1], "a", max_tokens=1)
    with pytest.raises(InvalidArgument, match="'a' has been submitted"):
        served.submit([1], "a")
    served.finish()
    with pytest.raises(InvalidArgument, match="'a' has been submitted"):
        served.scheduler.submit(request)
    served.submit([1], "a", max_tokens=1)


def test_a_full_queue_says_so_and_empties():
    served = engine(max_waiting=3, max_running=1)
    for _ in range(3):
        served.submit([1], max_tokens=2)
    with pytest.raises(QueueFull, match="3 requests wait, and the limit is 3"):
        served.submit([1])
    served.step()
    served.submit([1], max_tokens=1)
    served.finish()


def test_a_thousand_requests_wait():
    served = engine(max_waiting=1000, step_tokens=64, max_running=64)
    requests = [served.submit([i % VOCAB, i % 3], max_tokens=2) for i in range(1000)]
    while served.scheduler.has_work:
        served.step()
    assert all(request.num_written == 2 for request in requests)
    served.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_running": 0}, "must be positive"),
        ({"max_waiting": 0}, "must be positive"),
        ({"context": 1}, "context at least 2"),
        ({"max_chunk": -1}, "must be positive"),
        ({"step_tokens": 7}, "step_tokens=7 must be at least max_running=8"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits, message):
    with pytest.raises(InvalidArgument, match=message):
        engine(**limits)


def test_a_window_needs_pages_for_the_chunks_in_flight():
    groups = [LayerGroup("window", 11, 9)]  # 10 pages; two chunks of 16 span 8 + 32 tokens
    with pytest.raises(InvalidArgument, match=r"group window has 10 pages .* need 11: give"):
        FakeEngine(groups, 4, Limits(16, 8, 8, 64))
    FakeEngine(groups, 4, Limits(16, 8, 8, 64, max_chunk=14))


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": "hot"},
        {"temperature": float("inf")}, {"temperature": True}, {"top_k": -1}, {"top_k": 1.5},
        {"top_k": None}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2},
        {"repetition_penalty": 0}, {"seed": 1 << 63}, {"max_tokens": 0}, {"logprobs": 21},
        {"stop": ("",)}, {"stop": "END"}, {"stop": ("a",) * 17}, {"stop": (1,)},
    ],
    ids=str,
)  # fmt: skip
def test_parameters_out_of_range_are_refused_by_name(parameters):
    (name,) = parameters
    with pytest.raises(InvalidArgument, match=name):
        SamplingParameters(**parameters)
