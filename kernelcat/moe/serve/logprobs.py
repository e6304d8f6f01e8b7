"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernelcat.moe.tokenizer import Tokenizer

FLOOR = -9999.0
"""What stands for minus infinity, which JSON does not have; OpenAI's value."""


class TokenNames:
    """Texts and bytes of tokens, kept: few tokens make most of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: dict[int, tuple[str, list[int]]] = {}

    def of(self, token: int) -> tuple[str, list[int]]:
        """The text of ``token`` (bytes that are no character are written ``\\xHH``), its bytes."""
        kept = self._kept.get(token)
        if kept is None:
            data = self._tokenizer.token_bytes(token)
            kept = self._kept[token] = (data.decode(errors="backslashreplace"), list(data))
        return kept

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token with its log-probability, as /v1/chat/completions names it."""
        text, data = self.of(token)
        return {"token": text, "logprob": max(logprob, FLOOR), "bytes": data}


def of_chat(
    names: TokenNames, tokens: Sequence[int], logprobs: Sequence[Any], num_alternatives: int
) -> list[dict[str, Any]]:
    """``choices[].logprobs.content``: an entry for each of ``tokens``."""
    entries = []
    for token, chosen in zip(tokens, logprobs, strict=True):
        entry = names.entry(token, chosen.logprob)
        top = list(chosen.top)[:num_alternatives]
        entry["top_logprobs"] = [names.entry(other, logprob) for other, logprob in top]
        entries.append(entry)
    return entries


class CompletionLogprobs:
    """``choices[].logprobs`` of /v1/completions, piece by piece.

    ``text_offset`` counts characters of the token texts before a token.
    """

    def __init__(self, names: TokenNames, num_alternatives: int) -> None:
        self._names, self._num_alternatives = names, num_alternatives
        self._offset = 0

    def push(self, tokens: Sequence[int], logprobs: Sequence[Any]) -> dict[str, list[Any]]:
        """The lists for some new tokens."""
        lists: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token, chosen in zip(tokens, logprobs, strict=True):
            text, _ = self._names.of(token)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(max(chosen.logprob, FLOOR))
            lists["text_offset"].append(self._offset)
            top = list(chosen.top)[: self._num_alternatives]
            lists["top_logprobs"].append(
                {self._names.of(other)[0]: max(logprob, FLOOR) for other, logprob in top}
            )
            self._offset += len(text)
        return lists
