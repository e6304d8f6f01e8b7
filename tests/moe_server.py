"""A server in a thread, on a free port, with a small random model on the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import openai
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kernelcat import moe
from kernelcat.moe.engine.async_engine import AsyncEngine
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.served_engine import ServedEngine
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.serve.app import make_app
from kernelcat.moe.serve.server import Server, make_server
from kernelcat.moe.serve.service import Service
from kernelcat.moe.serve.settings import Settings
from kernelcat.moe.tokenizer import FolderTokenizer, Tokenizer

MODEL = "tiny"
VOCAB = 259
TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('begin with a user') }}{% endif %}"
    "{% for message in messages %}<turn>{{ message.role }}\n{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
DEADLINE = 60.0
"""Seconds after which a test has failed."""


def tiny_tokenizer() -> FolderTokenizer:
    """The bytes, one merge, an end of sequence, and the token that begins a turn."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate([*letters, "th"])}, [("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>"), AddedToken("<turn>")])
    return FolderTokenizer(backend, frozenset([backend.token_to_id("<eos>")]), TEMPLATE)


def tiny_engine(decode: Any, model: moe.Decoder | None = None, **limits: int) -> Engine:
    """An engine with a small random model; ``limits`` are ``num_pages`` and those of `Limits`."""
    if model is None:
        config = replace(moe.SIZES["small-llama"], vocab_size=VOCAB)
        model = moe.random_model(config, "cpu")
    num_pages = (limits.pop("num_pages", 400),) * len(moe.windows(model.cache_layers))
    fields = {"step_tokens": 64, "max_running": 16, "max_waiting": 64, "context": 256, **limits}
    return Engine(model, EngineSettings(Limits(**fields), 16, num_pages), decode)


@dataclass
class Served:
    """A server that runs; ``url`` is without ``/v1``."""

    url: str
    engine: Engine
    service: Service
    server: Server

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client, which does not try again."""
        defaults = {"api_key": "none", "max_retries": 0, "timeout": DEADLINE}
        return openai.OpenAI(base_url=f"{self.url}/v1", **{**defaults, **options})

    def check_idle(self) -> None:
        """Waits until no request is left, and proves that no page is."""
        wait_until(lambda: not self.engine.has_work)
        self.engine.check_integrity()
        assert self.engine.statistics().requests_running == 0


@contextmanager
def served(engine: Engine, tokenizer: Tokenizer, **settings: Any) -> Iterator[Served]:
    """Runs a server with ``engine`` until the context ends."""
    with running_server(AsyncEngine(engine), tokenizer, **settings) as (url, server):
        yield Served(url, engine, server.service, server)


@contextmanager
def running_server(
    engine: ServedEngine, tokenizer: Tokenizer, **settings: Any
) -> Iterator[tuple[str, Server]]:
    """The URL of a server, and the server, until the context ends."""
    service = Service(engine, tokenizer, Settings(MODEL, port=0, **settings))
    urls: list[str] = []
    server = make_server(make_app(service), service, urls.append)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: urls or not thread.is_alive())
    try:
        yield urls[0], server
    finally:
        server.should_exit = True
        thread.join()


def wait_until(condition: Any) -> None:
    """Waits until ``condition()`` holds, or fails."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)
