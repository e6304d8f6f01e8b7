"""Peers of `sample`. Their draws are their own, so their tokens cannot be compared with ours."""

from __future__ import annotations

from kernelcat.errors import Unsupported
from kernelcat.reference._flashinfer import import_flashinfer
from kernelcat.reference._peers import import_torch


def _why_not(problem) -> str | None:
    if not problem["rows"]:
        return "peers are not raced without rows"
    if problem["has_penalty"] or problem["has_logprobs"]:
        return "peers are raced without penalty and log probabilities"
    return None


def torch():
    """Argmax; or temperature, a sort for the filters, and softmax / exponential noise, compiled.

    torch draws random numbers only in graphs that torch itself captures, so the noise (rows, vocab)
    is drawn before the race: the peer is spared its time.
    """
    torch = import_torch("torch")

    def keep(logits, min_p, top_k, top_p):
        """Logits of the tokens that stay, sorted, and the ids of all."""
        x, ids = logits.sort(dim=-1, descending=True)
        rank = torch.arange(x.shape[1], device=x.device)
        is_in = x >= x[:, :1] + min_p.log()[:, None]
        is_in &= (top_k[:, None] <= 0) | (rank < top_k[:, None])
        probs = torch.where(is_in, x, float("-inf")).softmax(-1)
        is_in &= probs.cumsum(-1) - probs < top_p[:, None]
        return torch.where(is_in, x, float("-inf")), ids

    @torch.compile(fullgraph=True, dynamic=False)
    def greedy(logits, ids):
        ids.copy_(logits.argmax(-1))

    @torch.compile(fullgraph=True, dynamic=False)
    def draw(logits, temperature, min_p, top_k, top_p, noise, ids):
        x, order = logits.float() / temperature.clamp_min(1e-5)[:, None], None
        if min_p is not None:
            x, order = keep(x, min_p, top_k, top_p)
        best = (x.softmax(-1) / noise).argmax(-1, keepdim=True)
        ids.copy_((best if order is None else order.gather(1, best)).squeeze(1))

    def make(problem, arrays):
        reason = _why_not(problem)
        if reason:
            raise Unsupported(reason)
        if not problem["has_temperature"]:
            return lambda: greedy(arrays["logits"], arrays["ids"])
        names = ("logits", "temperature", "min_p", "top_k", "top_p")
        values = [arrays.get(name) for name in names]
        noise = torch.empty_like(arrays["logits"], dtype=torch.float32).exponential_()
        return lambda: draw(*values, noise, arrays["ids"])

    return make


def flashinfer():
    """FlashInfer's sampling without a sort; its noise is its own."""
    sampling = import_flashinfer().sampling

    def make(problem, arrays):
        reason = _why_not(problem)
        if reason or not problem["has_temperature"]:
            raise Unsupported(reason or "flashinfer is raced where tokens are drawn")
        logits, temperature = arrays["logits"].float(), arrays["temperature"].clamp_min(1e-5)
        if not problem["has_filters"]:
            return lambda: arrays["ids"].copy_(
                sampling.sampling_from_probs(sampling.softmax(logits, temperature))
            )
        vocab = problem["vocab"]
        top_k = arrays["top_k"].where(arrays["top_k"] > 0, vocab).clamp_max(vocab)
        return lambda: arrays["ids"].copy_(
            sampling.top_k_top_p_sampling_from_probs(
                sampling.softmax(logits, temperature), top_k, arrays["top_p"]
            )
        )

    return make
