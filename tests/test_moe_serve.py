"""The HTTP server with a real engine, called by the official client: what is answered."""

from __future__ import annotations

import json

import openai
import pytest
from moe_server import MODEL, served, tiny_engine, tiny_tokenizer
from prometheus_client.parser import text_string_to_metric_families

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße!"}]
PROMPT = "<turn>system\nBe brief.<turn>user\nGrüße!<turn>assistant\n"
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="module")
def running():
    tokenizer = tiny_tokenizer()
    with served(tiny_engine(tokenizer.decode), tokenizer, max_body=100_000) as found:
        yield found
        found.check_idle()


@pytest.fixture(scope="module")
def client(running):
    with running.client() as made:
        yield made


def get(running, path):
    return running.client()._client.get(f"{running.url}{path}")


def joined(events, chat):
    """The choices of a stream, each the sum of its events; and the usage."""
    choices, usage = {}, None
    for event in events:
        usage = event.usage or usage
        for part in event.choices:
            choice = choices.setdefault(part.index, {"text": "", "logprobs": [], "reason": None})
            assert choice["reason"] is None, "an event after the end of its choice"
            choice["text"] += (part.delta.content or "") if chat else part.text
            if part.logprobs is not None:
                choice["logprobs"] += (
                    part.logprobs.content if chat else part.logprobs.token_logprobs
                )
            choice["reason"] = part.finish_reason
    return choices, usage


def test_a_chat_is_a_completion_of_its_template(client):
    chat = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    plain = client.completions.create(prompt=PROMPT, **GREEDY)
    assert chat.choices[0].message.content == plain.choices[0].text != ""
    assert chat.choices[0].finish_reason == plain.choices[0].finish_reason == "length"
    assert (chat.object, chat.model, chat.choices[0].message.role) == (
        "chat.completion", MODEL, "assistant",
    )  # fmt: skip
    assert chat.usage.completion_tokens == 16
    assert chat.usage.prompt_tokens == plain.usage.prompt_tokens == chat.usage.total_tokens - 16


def test_prompts_may_be_texts_or_tokens_and_several(client):
    tokenizer = tiny_tokenizer()
    texts = ["Grüße", "the end"]
    by_text = client.completions.create(prompt=texts, **GREEDY)
    by_token = client.completions.create(prompt=[tokenizer.encode(t) for t in texts], **GREEDY)
    alone = [client.completions.create(prompt=text, echo=True, **GREEDY) for text in texts]
    found = [choice.text for choice in by_text.choices]
    assert found == [choice.text for choice in by_token.choices]
    assert [text + more for text, more in zip(texts, found, strict=True)] == [
        answer.choices[0].text for answer in alone
    ]
    assert [choice.index for choice in by_text.choices] == [0, 1]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
def test_a_stream_adds_up_to_the_answer(client, chat):
    fields = {"model": MODEL, "max_tokens": 20, "n": 3, "seed": 7}
    if chat:
        create, fields["messages"] = client.chat.completions.create, MESSAGES
        fields |= {"logprobs": True, "top_logprobs": 2}
    else:
        create, fields["prompt"] = client.completions.create, PROMPT
        fields |= {"logprobs": 2}
    whole = create(**fields)
    options = {"include_usage": True}
    choices, usage = joined(create(stream=True, stream_options=options, **fields), chat)
    assert sorted(choices) == [0, 1, 2]
    for choice in whole.choices:
        streamed = choices[choice.index]
        assert streamed["text"] == (choice.message.content if chat else choice.text)
        assert streamed["reason"] == choice.finish_reason
        expected = choice.logprobs.content if chat else choice.logprobs.token_logprobs
        assert streamed["logprobs"] == expected
    assert len({choice["text"] for choice in choices.values()}) == 3, "each choice has its seed"
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_choice_has_the_seed_of_its_number(client):
    def texts(seed, n):
        answer = client.completions.create(
            model=MODEL, prompt="a", max_tokens=12, seed=seed, n=n, temperature=2.0
        )
        return [choice.text for choice in answer.choices]

    assert texts(5, 3) == texts(5, 1) + texts(6, 1) + texts(7, 1)


def test_stop_strings_end_the_text(client):
    text = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    stop = text[5:8]
    answer = client.completions.create(prompt=PROMPT, stop=["never", stop], **GREEDY)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 16
    events = client.chat.completions.create(messages=MESSAGES, stop=stop, stream=True, **GREEDY)
    choices, _ = joined(events, chat=True)
    assert choices[0]["text"] == answer.choices[0].text and choices[0]["reason"] == "stop"


def test_the_end_of_sequence_ends_the_text_and_has_no_text(client, running):
    grammar = 'start: "ok"'
    answer = client.completions.create(
        prompt="a", logprobs=0, extra_body={"grammar": grammar}, **GREEDY
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("ok", "stop")
    assert choice.logprobs.tokens == ["o", "k"] and answer.usage.completion_tokens == 3
    many = client.completions.create(prompt="a", extra_body={"ignore_eos": True}, **GREEDY)
    assert many.usage.completion_tokens == 16


def test_logprobs_are_those_of_the_tokens(client):
    answer = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 16
    data = bytes(byte for entry in content for byte in entry.bytes)
    assert data.decode(errors="replace") == answer.choices[0].message.content
    for entry in content:
        values = [other.logprob for other in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True) and values[0] < 0
        assert entry.token == entry.top_logprobs[0].token and entry.logprob == values[0]
    plain = client.completions.create(prompt=PROMPT, logprobs=3, **GREEDY).choices[0].logprobs
    assert plain.token_logprobs == pytest.approx([entry.logprob for entry in content], abs=1e-4)
    assert plain.tokens == [entry.token for entry in content]
    assert [max(top.values()) for top in plain.top_logprobs] == plain.token_logprobs
    assert plain.text_offset[:2] == [0, len(plain.tokens[0])]


def test_output_fits_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["blue", "grey"]}, "n": {"type": "integer", "maximum": 99}},
        "required": ["sky", "n"],
        "additionalProperties": False,
    }
    response_format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    fields = {"model": MODEL, "messages": MESSAGES, "response_format": response_format}
    answer = client.chat.completions.create(max_tokens=150, seed=3, n=2, **fields)
    for choice in answer.choices:
        content = json.loads(choice.message.content)
        assert content.keys() == {"sky", "n"} and content["sky"] in ("blue", "grey")
        assert isinstance(content["n"], int) and choice.finish_reason == "stop"


def test_models_health_and_metrics(client, running):
    (entry,) = client.models.list().data
    assert (entry.id, entry.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == 256
    assert get(running, "/health").json() == {"status": "ok"}
    before = samples(running)
    client.completions.create(prompt="ab", **GREEDY)
    after = samples(running)
    for name, added in {
        "kernelcat_prompt_tokens_total": 2,
        "kernelcat_output_tokens_total": 16,
        "kernelcat_ttft_seconds_count": 1,
        "kernelcat_tpot_seconds_count": 1,
        "kernelcat_latency_seconds_count": 1,
        "kernelcat_responses_total[/v1/completions][200]": 1,
    }.items():
        assert after[name] - before.get(name, 0) == added, name
    assert after["kernelcat_requests_running"] == 0 == after["kernelcat_requests_waiting"]
    assert after["kernelcat_steps_total"] > before["kernelcat_steps_total"]


def samples(running):
    """Name of a sample, with the values of its labels -> value."""
    found = {}
    for family in text_string_to_metric_families(get(running, "/metrics").text):
        for sample in family.samples:
            labels = "".join(f"[{value}]" for value in sample.labels.values())
            found[sample.name + labels] = sample.value
    return found


REFUSED = {
    "temperature": {"temperature": -1},
    "top_p": {"top_p": 0},
    "n": {"n": 0},
    "seed": {"seed": 1 << 63},
    "max_tokens": {"max_tokens": -3},
    "stop": {"stop": ["a"] * 17},
    "stream_options": {"stream_options": {"include_usage": True}},
    "presence_penalty": {"presence_penalty": 0.5},
    "logit_bias": {"logit_bias": {"1": 1}},
    "top_logprobs": {"top_logprobs": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 21},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "messages": {"messages": []},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}
    },
    "grammar": {"extra_body": {"grammar": "start: missing"}},
    "foo": {"extra_body": {"foo": 1}},
    "top_k": {"extra_body": {"top_k": -1}},
}


@pytest.mark.parametrize("param", REFUSED)
def test_bad_parameters_are_refused_by_name(client, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, "max_tokens": 3, **REFUSED[param]}
        )
    error = caught.value.body
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "assistant", "content": "I"}], "refuses the messages: begin with a user"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0.*'text'"),
        ([{"role": "judge", "content": ""}], "messages.0.role"),
    ],
)
def test_messages_that_make_no_prompt_are_refused(client, messages, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(messages=messages, **GREEDY)
    assert caught.value.param == "messages"


def test_a_prompt_that_is_too_long_is_refused(client):
    for fields in ({"prompt": "a" * 256}, {"prompt": "a" * 100, "max_tokens": 157}):
        with pytest.raises(openai.BadRequestError, match="has room for 256") as caught:
            client.completions.create(**{"model": MODEL, "max_tokens": 1, **fields})
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="from 0 to 258"):
        client.completions.create(prompt=[1, 259], **GREEDY)
    with pytest.raises(openai.BadRequestError, match="context"):  # a stream has that status too
        client.completions.create(prompt="a" * 256, stream=True, **GREEDY)


def test_a_body_that_is_too_large_is_refused(client):
    with pytest.raises(openai.APIStatusError, match="more than 100000 bytes") as caught:
        client.completions.create(prompt="a" * 100_000, **GREEDY)
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


def test_other_errors_have_the_same_format(client, running):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(**{**GREEDY, "model": "gpt-5"}, prompt="a")
    assert caught.value.code == "model_not_found"
    raw = running.client()._client
    for answer, status in [
        (raw.get(f"{running.url}/v2"), 404),
        (raw.get(f"{running.url}/v1/completions"), 405),
        (raw.post(f"{running.url}/v1/completions", content=b"{"), 400),
        (raw.post(f"{running.url}/v1/completions", content=b"[]"), 400),
    ]:
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
