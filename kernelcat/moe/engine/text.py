"""Text of a request, token by token: incremental decoding, and stop strings.

A token is not a piece of text: a character may need several tokens, and a decoder may treat the
first token of a text in another way (a leading space). A stop string may begin in one token and end
in another. Text that may still change or may still become a stop string is held back, so that what
was returned is final.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""The text of token ids; bytes that are no character become U+FFFD."""

INCOMPLETE = "\ufffd"
MAX_HELD_TOKENS = 8
"""A character has at most four bytes. Where so many tokens make none, their text is returned."""


class Detokenizer:
    """Decodes tokens one by one.

    Each call decodes a few tokens only: those held back, and for context the tokens that were
    returned last. The scheme is that of text-generation-inference.

    Parameters
    ----------
    decode : the tokenizer's function
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._num_context = 0
        self._context = ""

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is incomplete."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        new = text[len(self._context) :]
        num_held = len(self._tokens) - self._num_context
        if num_held < MAX_HELD_TOKENS and (not new or text.endswith(INCOMPLETE)):
            return ""
        del self._tokens[: self._num_context]
        self._num_context = len(self._tokens)
        self._context = self._decode(self._tokens)
        return new

    def finish(self) -> str:
        """The text of tokens that were held back; no token follows."""
        text = self._decode(self._tokens)[len(self._context) :]
        self._tokens, self._num_context, self._context = [], 0, ""
        return text


class StopStrings:
    """Passes text on until a stop string is complete.

    The result does not depend on how the text is divided: the stop string that ends first counts,
    and of several that end there the longest.

    Parameters
    ----------
    stops : strings that are not empty
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """The text that cannot belong to a stop string any more."""
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)[1]]
        end = len(text) - self._num_held(text)
        self._held = text[end:]
        return text[:end]

    def _num_held(self, text: str) -> int:
        """Length of the longest end of ``text`` with which a stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            end = text[-count:]
            if any(len(stop) > count and stop.startswith(end) for stop in self._stops):
                return count
        return 0

    def finish(self) -> str:
        """The text that was held back; no text follows."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Tokens of a request in, final text out.

    Parameters
    ----------
    decode : the tokenizer's function
    stops : strings that end the text

    Examples
    --------
    >>> stream = TextStream(lambda tokens: "".join(map(chr, tokens)), ["END"])
    >>> [stream.push(ord(letter)) for letter in "an ENEND."]
    ['a', 'n', ' ', '', '', 'EN', '', '', '']
    >>> stream.is_stopped
    True
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._stops.is_stopped

    def push(self, token: int) -> str:
        """The text that is final since ``token`` is known."""
        return "" if self.is_stopped else self._stops.push(self._detokenizer.push(token))

    def finish(self) -> str:
        """The rest of the text; no token follows."""
        if self.is_stopped:
            return ""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()
