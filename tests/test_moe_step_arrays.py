"""Arrays of a step, and memory over ten thousand steps."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import tracemalloc

import numpy as np
import pytest
from fake_model import engine

from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.blocks import BlockManager, LayerGroup
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import Request
from kernelcat.moe.engine.scheduler import Scheduler
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.engine.step_arrays import StepArrays
from kernelcat.moe.engine.text import TextStream

# ---- arrays --------------------------------------------------------------------------------------


def test_arrays_describe_the_step():
    served = engine(0, 6, step_tokens=12)
    served.submit([1, 2], max_tokens=9, temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, seed=5)
    served.submit([3] * 15, max_tokens=9, repetition_penalty=2.0, seed=-6)
    served.step()
    first, second = served.scheduler.queue.running
    step, arrays = served.plan(), served.arrays
    assert [(chunk.start, chunk.end) for chunk in step.chunks] == [(2, 3), (10, 15)]
    assert arrays.tokens.tolist() == [first.tokens[2], 3, 3, 3, 3, 3]
    assert arrays.positions.tolist() == [2, 10, 11, 12, 13, 14]
    assert arrays.cu_q.tolist() == [0, 1, 6]
    assert arrays.kv_lens.tolist() == [3, 15]
    assert arrays.rows.tolist() == [0, 5]
    assert arrays.offset.tolist() == [3, 15]
    assert arrays.seed.tolist() == [5, -6]
    assert arrays.temperature.tolist() == [0.5, 0]
    assert arrays.top_k.tolist() == [7, 0]
    assert arrays.top_p.tolist() == [0.75, 1]
    assert arrays.min_p.tolist() == [0.25, 0]
    assert arrays.repetition_penalty.tolist() == [1, 2]
    for g, table in enumerate(arrays.block_tables):
        assert table[0, :1].tolist() == first.table.pages[g, :1].tolist()
        assert table[1, :4].tolist() == second.table.pages[g, :4].tolist()
    assert arrays.block_tables[1][1, 0] == 0 != arrays.block_tables[0][1, 0]  # before the window


def test_padding_is_sequences_of_one_token_in_slots_of_the_null_page():
    served = engine(0, 6)
    for _ in range(3):
        served.submit([1, 2, 3], max_tokens=9)
    served.step()
    step, arrays = served.scheduler.schedule(), served.arrays
    arrays.fill(step, batch=8)
    assert arrays.cu_q.tolist() == list(range(9))
    assert arrays.kv_lens.tolist() == [4, 4, 4, 1, 2, 3, 4, 1]
    assert arrays.positions.tolist() == [3, 3, 3, 0, 1, 2, 3, 0]
    assert arrays.rows.tolist() == list(range(8))
    assert arrays.temperature.tolist() == [0] * 8
    assert arrays.top_p.tolist() == arrays.repetition_penalty.tolist() == [1] * 8
    for table in arrays.block_tables:
        assert table[3:, 0].tolist() == [0] * 5
        assert table[:3, 0].all()
    arrays.fill(step, batch=3)
    assert len(arrays.kv_lens) == len(arrays.tokens) == 3
    for batch in (2, 9):
        with pytest.raises(InvalidArgument, match=f"3 sequences and cannot be padded to {batch}"):
            arrays.fill(step, batch)


def test_a_step_with_a_prompt_is_not_padded():
    served = engine()
    served.submit([1, 2, 3], max_tokens=9)
    step = served.scheduler.schedule()
    with pytest.raises(InvalidArgument, match="only steps whose requests have one new token"):
        served.arrays.fill(step, 4)


def test_buffers_come_from_the_caller():
    made = []

    def allocate(shape, dtype):
        made.append(np.zeros(shape, dtype))
        return made[-1]

    served = engine()
    arrays = StepArrays(served.manager, served.limits, 3, allocate)
    assert arrays.tokens.base is made[0]
    assert len(arrays._by_row["rows"]) == 16  # no more rows than tokens


def test_the_largest_step_fits():
    served = engine(step_tokens=40, max_running=8, speculation=Speculation(4, 1))
    for _ in range(8):
        served.submit([5] * 5, max_tokens=30)
    served.finish()
    assert max(len(output.tokens) for output in served.outputs) > 1


# ---- ten thousand steps --------------------------------------------------------------------------


def test_memory_stays_flat_over_ten_thousand_steps_of_mixed_sizes():
    """Python's memory whenever all requests have ended, and the addresses of all buffers."""
    dice, ids = random.Random(0), itertools.count()
    groups = [LayerGroup("all", 100), LayerGroup("window", 60, 32)]
    limits = Limits(step_tokens=64, max_running=8, max_waiting=8, context=300, max_chunk=48)
    manager = BlockManager(groups, 8, 38)
    scheduler, arrays = Scheduler(manager, limits), StepArrays(manager, limits)
    common = dice.choices(range(1000), k=40)
    buffers = [*arrays._by_token.values(), *arrays._by_row.values(), arrays._tables]
    addresses = [buffer.ctypes.data for buffer in buffers]
    previous, num_ended, num_cached, batches = None, 0, 0, set()

    def submit():
        prompt = dice.choice((common, [])) + dice.choices(range(1000), k=dice.choice((1, 30, 200)))
        text = TextStream(lambda tokens: "x" * len(tokens), ["y"])
        parameters = SamplingParameters(max_tokens=dice.randint(1, 40), stop=("y",))
        scheduler.submit(Request(str(next(ids)), prompt, parameters, text))

    def advance():
        nonlocal previous, num_ended, num_cached
        step = scheduler.schedule()
        if step is not None:
            arrays.fill(step)
            batches.add((len(step.chunks), step.max_q))
        if previous is not None:
            for output in scheduler.update(previous, [dice.randrange(9)] * previous.num_rows):
                num_ended += output.finish_reason is not None
                num_cached += output.request.num_cached > 0
        if scheduler.num_steps % 97 == 0 and scheduler.queue.running:
            scheduler.cancel(scheduler.queue.running[-1].id)
        previous = step

    def finish(num_steps):
        """Runs ``num_steps`` more steps under load, then until all requests have ended."""
        end = scheduler.num_steps + num_steps
        while scheduler.num_steps < end:
            while len(scheduler.queue.waiting) < 3:
                submit()
            advance()
        while scheduler.has_work or previous:
            advance()
        scheduler.check_integrity()
        gc.collect()

    num_objects = []
    for _ in range(9):
        finish(1000)
        num_objects.append(sys.getallocatedblocks())
    tracemalloc.start()
    try:
        finish(1000)
        growth = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # the first thousand steps fill the prefix cache
    assert max(num_objects) - num_objects[0] < 500
    # what was made before tracing is not subtracted when it is replaced: the hashes of all pages
    assert growth < 160 * 600
    assert [buffer.ctypes.data for buffer in buffers] == addresses
    assert arrays.tokens.base is arrays._by_token["tokens"]
    assert min(num_ended, num_cached, len(batches)) > 100
    assert scheduler.queue.num_preemptions > 20
