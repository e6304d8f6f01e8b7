"""Other people's implementations of a model, timed as `bench` times the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kernelcat.errors import MissingDependency
from kernelcat.moe.bench import Decoding, Round, prompts
from kernelcat.moe.config import Config

PEERS = ("transformers",)


def load_transformers(config: Config, folder: str | Path | None, device: str) -> Any:
    """The model of the package transformers, in bfloat16 on a GPU and float32 on a CPU.

    Without ``folder`` its weights are random, and experts in 4 bits become bfloat16: transformers
    needs downloaded kernels for MXFP4.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer needs: pip install transformers") from error
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if folder is not None:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model.to(device).eval()
    content: dict[str, Any] = {  # transformers takes lists, not tuples
        key: list(value) if isinstance(value, tuple) else value
        for key, value in config.published().items()
        if key != "quantization_config"
    }
    theirs = transformers.AutoConfig.for_model(**content)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(theirs, dtype=dtype).eval()


def time_transformers(
    model: Any,
    vocab_size: int,
    batches: Sequence[int],
    context: int,
    num_tokens: int,
    num_rounds: int = 3,
    done: Callable[[Decoding], None] = lambda result: None,
) -> list[Decoding]:
    """Times greedy `generate` at each batch: a run of one token is the prefill.

    ``done`` is called with the result of each batch as soon as it is measured.
    """
    found = []
    for batch in batches:
        rounds = []
        for seed in range(num_rounds + 1):
            ids = torch.tensor(prompts(batch, context, vocab_size, seed), device=model.device)
            prefill = _seconds(model, ids, 1)
            decoding = _seconds(model, ids, num_tokens) - prefill
            rounds.append(Round(prefill, decoding, batch * (num_tokens - 1)))
        found.append(Decoding.of("transformers", batch, context, num_tokens, rounds[1:]))
        done(found[-1])
    return found


def _seconds(model: Any, ids: torch.Tensor, num_tokens: int) -> float:
    """Seconds of `generate` for exactly ``num_tokens`` tokens of each row."""
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens,
            min_new_tokens=num_tokens, do_sample=False, pad_token_id=0,
        )  # fmt: skip
    out.cpu()
    return time.perf_counter() - start
