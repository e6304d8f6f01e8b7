"""Text of tokens one by one, and stop strings that span tokens."""

from __future__ import annotations

import doctest
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcat.moe.engine import text
from kernelcat.moe.engine.text import MAX_HELD_TOKENS, Detokenizer, StopStrings, TextStream


def byte_level(tokens):
    """GPT-2's kind of tokenizer: tokens are bytes."""
    return bytes(tokens).decode("utf-8", "replace")


def byte_fallback(tokens):
    """SentencePiece's kind: a run of bytes is one text or U+FFFD for each byte; no leading space.

    Tokens from 256 on are characters.
    """
    parts, run = [], []
    for token in [*tokens, 256]:
        if token < 256:
            run.append(token)
            continue
        try:
            parts.append(bytes(run).decode())
        except UnicodeDecodeError:
            parts.append("\ufffd" * len(run))
        run = []
        parts.append(chr(token - 256) if token > 256 else "")
    return "".join(parts).removeprefix(" ")


def pushed(decode, tokens):
    detokenizer = Detokenizer(decode)
    return [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]


TEXT = st.text(st.sampled_from("a é漢🙂\n"), max_size=12)


@given(TEXT)
def test_pieces_are_the_text(whole):
    assert "".join(pushed(byte_level, whole.encode())) == whole


@given(TEXT)
def test_a_piece_is_whole_characters_and_comes_with_its_last_byte(whole):
    pieces = pushed(byte_level, whole.encode())
    ends = list(accumulate(len(letter.encode()) for letter in whole))
    assert [i for i, piece in enumerate(pieces) if piece] == [end - 1 for end in ends]


@given(st.lists(st.sampled_from("a é漢🙂"), max_size=10), st.data())
def test_runs_of_bytes_and_leading_spaces_are_decoded_in_context(letters, data):
    tokens = []
    for letter in letters:
        in_bytes = data.draw(st.booleans())
        tokens += letter.encode() if in_bytes else [256 + ord(letter)]
    assert "".join(pushed(byte_fallback, tokens)) == byte_fallback(tokens)


def test_bytes_that_are_no_character_are_held_for_few_tokens_only():
    pieces = pushed(byte_level, [0xFF] * 100)
    assert "".join(pieces) == "\ufffd" * 100
    gaps = [b - a for a, b in pairwise(i for i, piece in enumerate(pieces) if piece)]
    assert max(gaps) <= MAX_HELD_TOKENS


def test_each_call_decodes_few_tokens():
    sizes = []

    def decode(tokens):
        sizes.append(len(tokens))
        return byte_level(tokens)

    pushed(decode, "漢字🙂 and text".encode() * 20 + bytes([0xFF]) * 50)
    assert max(sizes) <= 2 * MAX_HELD_TOKENS


def test_tokens_without_text_are_not_kept_forever():
    sizes = []

    def decode(tokens):
        sizes.append(len(tokens))
        return "".join(chr(token) for token in tokens if token)

    pieces = pushed(decode, [65, *[0] * 100, 66])
    assert "".join(pieces) == "AB"
    assert max(sizes) <= 2 * MAX_HELD_TOKENS


def stopped(stops, pieces):
    stop_strings = StopStrings(stops)
    out = [stop_strings.push(piece) for piece in pieces]
    return "".join(out) + stop_strings.finish(), stop_strings.is_stopped


LETTERS = st.text(st.sampled_from("ab"), max_size=14)


@given(LETTERS, st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=3))
def test_the_stop_string_that_ends_first_counts(whole, stops):
    ends = [
        (end, end - len(stop))
        for end in range(len(whole) + 1)
        for stop in stops
        if whole[:end].endswith(stop)
    ]
    expected = (whole[: min(ends)[1]], True) if ends else (whole, False)
    assert stopped(stops, [whole]) == expected
    assert stopped(stops, whole) == expected  # letter by letter


@given(LETTERS, st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=3))
def test_only_a_possible_beginning_of_a_stop_string_is_held(whole, stops):
    stop_strings, out = StopStrings(stops), ""
    for i, letter in enumerate(whole):
        out += stop_strings.push(letter)
        if stop_strings.is_stopped:
            break
        held = whole[len(out) : i + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("pieces", [["Hello<|e", "nd|>more"], list("Hello<|end|>more")])
def test_nothing_follows_a_stop_string_that_spans_tokens(pieces):
    assert stopped(["<|end|>"], pieces) == ("Hello", True)


def test_a_stop_string_in_the_last_held_bytes_counts():
    stream = TextStream(byte_level, ["\ufffd"])
    assert stream.push(65) == "A"
    assert stream.push(0xFF) == ""
    assert stream.finish() == ""
    assert stream.is_stopped


def test_a_stream_flushes_bytes_and_half_a_stop_string():
    stream = TextStream(byte_level, ["END"])
    assert "".join(map(stream.push, b"an EN\xe6")) == "an "
    assert stream.finish() == "EN\ufffd"


def test_example_of_the_docstring():
    assert doctest.testmod(text).failed == 0
