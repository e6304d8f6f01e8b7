"""Text from elsewhere (databases, file names, compilers) as a terminal may show it."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` with every character that a terminal obeys instead of showing written as ``\\x1b``.

    These are control characters, marks that turn the direction of writing, and lone surrogates.
    Line ends and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
