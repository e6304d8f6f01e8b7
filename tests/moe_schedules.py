"""Schedules of the engine, and what they must write: for tests on a CPU and on a GPU.

In float32 every schedule writes transformers' tokens exactly. In 16 bits sums are rounded, and
kernels for another number of tokens round them differently, so another token may win where two
nearly tie; from there on the texts are different ones. `check_near` therefore asks transformers for
the distributions along the very text that was written, and compares every position with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from moe_models import DECODE_16, LENGTHS

from kernelcat import moe
from kernelcat.moe.engine.engine import Engine, RequestOutput
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import MAX_LOGPROBS, SamplingParameters
from kernelcat.moe.engine.sampling import TokenLogprob
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.engine.statistics import Statistics

PAGE = 16
NEAR = 0.85
"""Part of the positions that must agree in 16 bits. At the others a router has chosen another
expert, because two scores nearly tie. The oracles in bfloat16 agree at 0.93 and more of them with
gpt-oss, and everywhere with a dense model; planted faults leave 0.61 and less."""
MAX_KL = 2e-3
"""Kullback-Leibler divergence of a position that agrees, in nats, as FORMATS allows it."""
BEST = 5
"""A token that agrees is among so many best ones of transformers."""


@dataclass
class Written:
    """A prompt of ``length`` tokens, with the tokens and log-probabilities that an engine adds."""

    length: int
    tokens: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)


def engine(
    model: moe.Decoder, num_pages: int = 60, limits: Any = (), decode: Any = None, **settings: Any
) -> Engine:
    sizes = {"step_tokens": 128, "max_running": 4, "context": 160, **dict(limits)}
    defaults: dict[str, Any] = {
        "page_size": PAGE,
        "num_pages": (num_pages,) * len(moe.windows(model.cache_layers)),
    }
    if model.device.type == "cuda":
        defaults["batch_sizes"] = (4,)  # each size has kernels of its own to compile
    return Engine(model, EngineSettings(limits=Limits(**sizes), **{**defaults, **settings}), decode)


def run(served: Engine, has_faults: bool = False) -> list[RequestOutput]:
    """Runs until all requests have ended, proving integrity after each step."""
    outputs = []
    while served.has_work:
        outputs += served.step()
        served.check_integrity()
    assert served.statistics().pages_in_use == 0
    assert has_faults or not [output.error for output in outputs if output.error]
    return outputs


def write(served: Engine, prompts: Sequence[Sequence[int]], **asked: Any) -> list[Written]:
    """What the engine writes after prompts, with the parameters ``asked``."""
    parameters = SamplingParameters(**{"temperature": 0.0, **asked})
    requests = [served.submit(prompt, parameters) for prompt in prompts]
    outputs = run(served)
    return [
        Written(len(prompt), request.tokens, [
            logprob for output in outputs if output.request_id == request.id
            for logprob in output.logprobs
        ])
        for prompt, request in zip(prompts, requests, strict=True)
    ]  # fmt: skip


def tokens(texts: Sequence[Written]) -> list[list[int]]:
    return [text.tokens for text in texts]


# ---- schedules -----------------------------------------------------------------------------------

Proof = Callable[[Statistics], bool]

SCHEDULES: dict[str, tuple[dict[str, Any], Proof]] = {
    "chunks": ({"limits": {"max_chunk": 7}}, lambda s: s.steps_total > 70 / 7),
    "small steps": ({"limits": {"step_tokens": 9}}, lambda s: s.steps_total > 108 / 9),
    "overlap": ({"is_overlapped": True}, lambda s: s.steps_total > 0),
    "padding": ({"batch_sizes": (1, 2, 4)}, lambda s: s.steps_total > 0),
    "overlap, padding, chunks": (
        {"batch_sizes": (2,), "is_overlapped": True, "limits": {"max_chunk": 20}},
        lambda s: s.steps_total > 70 / 20,
    ),
    "drafts": ({"speculation": Speculation(3, 1)}, lambda s: s.draft_tokens_total > 0),
    "overlap, padding, drafts": (
        {"speculation": Speculation(2, 1), "batch_sizes": (1, 4), "is_overlapped": True},
        lambda s: s.draft_tokens_total > 0,
    ),
    "no prefix cache": ({"has_prefix_cache": False}, lambda s: s.pages_cached == 0),
}
"""Name -> settings, and what the statistics show where the schedule has run."""


def scheduled(
    name: str, model: moe.Decoder, prompts: Sequence[list[int]], **asked: Any
) -> list[Written]:
    """What the engine writes under the schedule ``name``."""
    settings, proof = SCHEDULES[name]
    served = engine(model, **settings)
    texts = write(served, prompts, **asked)
    assert proof(served.statistics())
    served.close()
    return texts


def preempted(
    model: moe.Decoder, prompts: Sequence[list[int]], **asked: Any
) -> tuple[list[Written], list[Written]]:
    """Texts of 40 tokens with pages for all requests, and with so few that some wait again."""
    prompts = [prompt[:20] for prompt in prompts]
    ample, scarce = engine(model), engine(model, 9, {"max_chunk": 16})
    texts = tuple(write(served, prompts, max_tokens=40, **asked) for served in (ample, scarce))
    assert scarce.statistics().preemptions_total > 0 == ample.statistics().preemptions_total
    for served in (ample, scarce):
        served.close()
    return texts[0], texts[1]


def hit(model: moe.Decoder, prompts: Sequence[list[int]], **asked: Any) -> list[Written]:
    """What is written after the prompts of `LENGTHS` when the prefix cache has all full blocks."""
    served = engine(model)
    write(served, prompts, **asked)
    before = served.statistics()
    texts = write(served, prompts, **asked)
    after = served.statistics()
    blocks = sum((length - 1) // PAGE for length in LENGTHS)
    assert after.cached_tokens_total - before.cached_tokens_total == PAGE * blocks
    assert after.prompt_tokens_total - before.prompt_tokens_total == sum(LENGTHS)
    served.close()
    return texts


def drafted(model: moe.Decoder, **asked: Any) -> tuple[list[Written], list[Written]]:
    """Texts without and with drafts, of which some are accepted, so that steps are saved.

    A prompt of one token over and over makes a small model repeat itself.
    """
    plain, drafts = engine(model), engine(model, speculation=Speculation(4, 1))
    texts = tuple(write(s, [[7] * 20], max_tokens=40, **asked) for s in (plain, drafts))
    saved = plain.statistics().steps_total - drafts.statistics().steps_total
    assert 0 < saved == drafts.statistics().accepted_tokens_total
    for served in (plain, drafts):
        served.close()
    return texts[0], texts[1]


# ---- 16 bits -------------------------------------------------------------------------------------


def check_near(
    theirs: Any, texts: Sequence[Written], share: float = NEAR, tolerance: float = DECODE_16
) -> None:
    """Compares all positions with what transformers' model ``theirs`` computes along the texts.

    ``share`` of them must agree; ``tolerance`` is that of a logit, a part of the largest one.
    """
    near = [each for text in texts for each in _near(theirs, text, tolerance)]
    assert sum(near) >= share * len(near), f"{sum(near)} of {len(near)} positions agree"


def _near(theirs: Any, text: Written, tolerance: float) -> list[bool]:
    """Whether each token is transformers' best one or nearly ties with it, and where there are
    log-probabilities, whether they are transformers'."""
    with torch.no_grad():
        logits = theirs(torch.tensor([text.tokens])).logits[0].double()
    rows = logits[text.length - 1 : -1]
    written = torch.tensor(text.tokens[text.length :])
    chosen = rows.gather(1, written[:, None])
    allowed = 2 * tolerance * logits.abs().max()  # both logits may be wrong
    is_near = (rows.amax(1) - chosen[:, 0] <= allowed) & ((rows > chosen).sum(1) < BEST)
    if text.logprobs:
        assert len(text.logprobs) == len(written)
        pairs = zip(rows.log_softmax(1), text.logprobs, strict=True)
        is_near &= torch.tensor([_divergence(*pair) for pair in pairs]) <= MAX_KL
    found: list[bool] = is_near.tolist()
    return found


def _divergence(reference: torch.Tensor, logprob: TokenLogprob) -> float:
    """What the most probable tokens add to KL(reference || engine), in nats; no term is negative
    (`kernelcat.moe.divergence`)."""
    assert len(logprob.top) == MAX_LOGPROBS
    ids, values = zip(*logprob.top, strict=True)
    p, q = reference[list(ids)], torch.tensor(values, dtype=reference.dtype)
    return float((p.exp() * (p - q) - p.exp() + q.exp()).sum())
