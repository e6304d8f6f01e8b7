"""Requests to engines in other processes, and waiting for their numbers."""

from __future__ import annotations

import asyncio


async def answer(engine, prompt, parameters, **options):
    """All outputs of a request as one."""
    outputs = [output async for output in engine.generate(prompt, parameters, **options)]
    for output in outputs[1:]:
        outputs[0].extend(output)
    return outputs[0]


async def until(engine, **expected) -> None:
    """Waits until the statistics are as expected."""
    for _ in range(1000):
        found = await asyncio.to_thread(engine.metrics)
        if all(found[name] == value for name, value in expected.items()):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(found)


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens that differ by ``start``."""
    return [(start + i * i) % 250 for i in range(length)]
