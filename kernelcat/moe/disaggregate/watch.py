"""Finds an engine's process that hangs, and ends it: then all who wait for it get an error."""

from __future__ import annotations

import asyncio

from kernelcat.moe.engine.engine import EngineError
from kernelcat.moe.serve.engine_process import EngineProcess

PATIENCE_S = 7.0
"""Seconds after which a step that has not ended, or an answer that has not come, never will."""
INTERVAL_S = 0.5


async def watch(process: EngineProcess, patience_s: float = PATIENCE_S) -> None:
    """Asks the engine for its statistics until it ends, and ends it if it hangs."""
    loop = asyncio.get_running_loop()
    num_steps, since = -1.0, loop.time()
    while process.is_healthy:
        try:
            numbers = await asyncio.wait_for(asyncio.to_thread(process.metrics), patience_s)
        except TimeoutError:
            break
        except EngineError:
            return
        if numbers["steps_total"] != num_steps or not numbers["requests_running"]:
            num_steps, since = numbers["steps_total"], loop.time()
        elif loop.time() > since + patience_s:
            break
        await asyncio.sleep(INTERVAL_S)
    await asyncio.to_thread(process.kill)
