"""Constraints on the output: a JSON schema or a grammar, by `llguidance`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy.typing as npt

from kernelcat.bounded import Bounded
from kernelcat.errors import InvalidArgument, KernelcatError
from kernelcat.moe.serve.chat_format import chat_format
from kernelcat.moe.tokenizer import FolderTokenizer, HarmonyTokenizer, Tokenizer

MAX_KEPT = 64
"""Grammars that are kept compiled; a compilation takes milliseconds, or much longer."""

WHITESPACE = r"[ \t\n]{1,20}"
"""Between the tokens of JSON: no more than a deep indentation, or a model may never end it."""


class GrammarError(KernelcatError):
    """A text and its grammar have parted; the engine must not write such a token."""


class Grammar:
    """A grammar in the middle of a text: the `Constraint` of one request.

    After the grammar's end only the tokens that end the text are allowed.

    Attributes
    ----------
    text : the grammar as llguidance writes it, for `Grammars.compiled`
    """

    def __init__(self, matcher: llguidance.LLMatcher, text: str) -> None:
        self._matcher, self.text = matcher, text

    def copy(self) -> Grammar:
        """The grammar at the same place of its text, for another request."""
        return Grammar(self._matcher.deep_copy(), self.text)

    def allowed(self, mask: npt.NDArray[Any]) -> None:
        """Writes the tokens that may come next to ``mask``, int32 (ceil(vocab / 32),).

        Raises
        ------
        GrammarError
            The grammar needs more time or memory than its parser may take.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    def append(self, token: int) -> None:
        """Takes the token that was chosen.

        Raises
        ------
        GrammarError
            The grammar does not allow the token here.
        """
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar failed: {self._matcher.get_error()}")


class Grammars:
    """Compiles grammars for one tokenizer.

    Parameters
    ----------
    tokenizer : its tokens
    vocab_size : of the model, which may have more tokens than the tokenizer
    stop_tokens : tokens that end a text

    Raises
    ------
    InvalidArgument
        There is no stop token, so that no text could end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_tokens: frozenset[int]) -> None:
        if not stop_tokens:
            raise InvalidArgument("grammars need a model with an end-of-sequence token")
        self._tokenizer = _adapted(tokenizer, vocab_size, sorted(stop_tokens))
        self._kept = Bounded[str, llguidance.LLMatcher](MAX_KEPT)

    def json(self, schema: Any) -> Grammar:
        """The grammar of JSON that fits ``schema``.

        Raises
        ------
        InvalidArgument
            The schema is not valid, or has something that no grammar can express.
        """
        try:
            text = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE}
            )
        except ValueError as error:
            raise InvalidArgument(f"the schema is not valid: {error}") from error
        return self.compiled(text, "the schema")

    def lark(self, text: str) -> Grammar:
        """The grammar that ``text`` describes in llguidance's dialect of Lark.

        Raises
        ------
        InvalidArgument
            The grammar is not valid.
        """
        return self.compiled(llguidance.LLMatcher.grammar_from_lark(text))

    def compiled(self, text: str, name: str = "the grammar") -> Grammar:
        """The grammar whose `Grammar.text` is ``text``; messages call it ``name``."""
        matcher = self._kept.get(text)
        if matcher is None:
            matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0)
            if matcher.is_error():
                lines = matcher.get_error().strip().splitlines() or ["unknown error"]
                raise InvalidArgument(f"{name} is not valid: {lines[0]}")
            self._kept[text] = matcher
        return Grammar(matcher.deep_copy(), text)


def grammars_of(tokenizer: Tokenizer, vocab_size: int) -> Grammars:
    """The grammars of a model with ``vocab_size`` tokens; see `Grammars` for errors."""
    form = chat_format(tokenizer)
    stop_tokens = tokenizer.stop_tokens | (form.stop_tokens if form else frozenset())
    return Grammars(tokenizer, vocab_size, stop_tokens)


def _adapted(
    tokenizer: Tokenizer, vocab_size: int, stop_tokens: Sequence[int]
) -> llguidance.LLTokenizer:
    """``tokenizer`` as llguidance takes it."""
    if isinstance(tokenizer, FolderTokenizer):
        source: Any = tokenizer.backend.to_str()
    else:
        source = llguidance.TokenizerWrapper(_Tokens(tokenizer, stop_tokens[0]))
    return llguidance.LLTokenizer(source, n_vocab=vocab_size, eos_token=list(stop_tokens))


class _Tokens:
    """What llguidance reads of a tokenizer that it does not know."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token: int) -> None:
        self.eos_token_id = eos_token
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = []
        if isinstance(tokenizer, HarmonyTokenizer):
            is_special = tokenizer.encoding.is_special_token
            self.special_token_ids = list(filter(is_special, range(tokenizer.vocab_size)))
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode() if isinstance(text, bytes) else text)
