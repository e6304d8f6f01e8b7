"""Readers of outputs: merged, ended, failed, and gone."""

from __future__ import annotations

import asyncio

import pytest

from kernelcat.moe.engine.engine import EngineError, RequestOutput
from kernelcat.moe.engine.readers import Readers
from kernelcat.moe.engine.request import FinishReason


def output(*tokens: int, ends: bool = False) -> RequestOutput:
    return RequestOutput("a", list(tokens), finish_reason=FinishReason.STOP if ends else None)


def test_outputs_that_wait_are_one_and_the_last_one_ends_the_reader() -> None:
    async def work() -> None:
        readers, cancelled = Readers(), list[str]()
        with readers.reading("a", cancelled.append) as reader:
            readers.put([output(1), output(2), RequestOutput("of nobody", [9])])
            assert (await reader.get()).tokens == [1, 2]
            assert readers.are_waiting
            readers.put([output(3), output(4, ends=True)])
            assert [part.tokens async for part in reader] == [[3, 4]]
            assert not readers.are_waiting
        assert cancelled == []

    asyncio.run(work())


def test_an_error_comes_behind_outputs_that_wait_and_nothing_behind_an_error() -> None:
    async def work() -> None:
        readers, cancelled = Readers(), list[str]()
        with readers.reading("a", cancelled.append) as reader:
            readers.put([output(1)])
            readers.fail("a", ValueError("first"))
            readers.fail_all("second")
            readers.put([output(2)])
            assert (await reader.get()).tokens == [1]
            for _ in range(2):
                with pytest.raises(ValueError, match="first"):
                    await reader.get()
        assert cancelled == ["a"] and not readers.are_waiting
        with readers.reading("a") as reader:
            readers.fail_all("the process has ended")
            with pytest.raises(EngineError, match="has ended"):
                await reader.get()

    asyncio.run(work())


def test_a_request_may_have_the_id_of_one_that_has_ended() -> None:
    async def work() -> None:
        readers, cancelled = Readers(), list[str]()
        with readers.reading("a", cancelled.append) as first:
            readers.put([output(1, ends=True)])
            await first.get()
            later = readers.reading("a", cancelled.append)
            second = later.__enter__()
        readers.put([output(2)])
        assert (await second.get()).tokens == [2]
        later.__exit__(None, None, None)
        assert cancelled == ["a"]

    asyncio.run(work())
