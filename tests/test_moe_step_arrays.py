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
from kernelcat.moe.engine.blocks import BlockManager, BlockTable, LayerGroup
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import Request
from kernelcat.moe.engine.scheduler import Scheduler
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.engine.step import ScheduledChunk, Step
from kernelcat.moe.engine.step_arrays import StepArrays
from kernelcat.moe.engine.step_sizes import Size, StepSizes
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


def test_block_tables_of_all_groups_begin_where_no_call_copies_them():
    served, width = engine(), 5
    manager = BlockManager([LayerGroup(name, 100) for name in "abc"], 4, width)
    arrays = StepArrays(manager, StepSizes(served.limits, 0, ()))
    for batch in range(1, 9):
        arrays.show(Size(batch, batch, batch, 1))
        tables = arrays.block_tables
        starts = [table.ctypes.data - tables[0].ctypes.data for table in tables]
        assert {table.shape for table in tables} == {(batch, width)}
        assert all(table.flags.c_contiguous for table in tables)
        assert all(later - start >= table.nbytes for start, later, table
                   in zip(starts, starts[1:], tables, strict=False))  # fmt: skip
        assert not any(start % 16 for start in starts)


def test_padding_is_sequences_of_one_token_in_slots_of_the_null_page():
    served = engine(0, 6)
    for _ in range(3):
        served.submit([1, 2, 3], max_tokens=9)
    served.step()
    step, arrays = served.scheduler.schedule(), served.arrays
    arrays.fill(step, Size(8, 8, 8, 1))
    assert arrays.cu_q.tolist() == list(range(9))
    assert arrays.kv_lens.tolist() == [4, 4, 4, 1, 2, 3, 4, 1]
    assert arrays.positions.tolist() == [3, 3, 3, 0, 1, 2, 3, 0]
    assert arrays.rows.tolist() == list(range(8))
    assert arrays.temperature.tolist() == [0] * 8
    assert arrays.top_p.tolist() == arrays.repetition_penalty.tolist() == [1] * 8
    for table in arrays.block_tables:
        assert table[3:, 0].tolist() == [0] * 5
        assert table[:3, 0].all()
    arrays.fill(step)
    assert len(arrays.kv_lens) == len(arrays.tokens) == 3
    for batch in (2, 10):
        with pytest.raises(InvalidArgument, match=r"step 1 .* cannot be padded to"):
            arrays.fill(step, Size(batch, batch, batch, 1))


def test_added_tokens_of_a_step_with_a_prompt_are_one_sequence():
    served = engine(0, 6)
    served.submit([1, 2, 3], max_tokens=9)
    step, arrays = served.scheduler.schedule(), served.arrays
    with pytest.raises(InvalidArgument, match="need more sequences"):
        arrays.fill(step, Size(1, 9, 1, 9))
    arrays.fill(step, Size(4, 9, 2, 9))
    assert arrays.tokens.tolist() == [1, 2, 3, *[0] * 6]
    assert arrays.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert arrays.cu_q.tolist() == [0, 3, 9, 9, 9]
    assert arrays.kv_lens.tolist() == [3, 6, 0, 0]
    assert arrays.rows.tolist() == [2, 1]
    assert not arrays.block_tables[0][1:].any()


def test_a_step_that_verifies_drafts_is_padded_by_as_many_sequences_again():
    served = engine(0, 6)
    for i in range(2):
        served.submit([i + 1, 2, 3], max_tokens=9)
    served.step()
    step, arrays = served.scheduler.schedule(), served.arrays
    arrays.fill(step, Size(4, 8, 8, 4))
    assert arrays.cu_q.tolist() == [0, 1, 2, 6, 8]
    assert arrays.kv_lens.tolist() == [4, 4, 4, 2]
    assert arrays.positions.tolist() == [3, 3, 0, 1, 2, 3, 0, 1]
    assert arrays.rows.tolist() == list(range(8))
    for table in arrays.block_tables:
        assert table[:2, 0].all() and not table[2:].any()
    with pytest.raises(InvalidArgument, match="which have 2 tokens each at most"):
        arrays.fill(step, Size(3, 8, 8, 2))


@pytest.mark.parametrize("num_drafts", (0, 1, 4))
@pytest.mark.parametrize(
    ("batches", "context"), [((1, 2, 4), 64), ((1, 2), 5), ((), 5), ((), 64), ((3,), 1000)]
)
def test_every_size_can_be_filled_with_added_sequences(batches, context, num_drafts):
    limits = Limits(step_tokens=100, max_running=3, context=context)
    sizes = StepSizes(limits, num_drafts, batches)
    arrays = StepArrays(BlockManager([LayerGroup("all", 9)], 4, -(-context // 4)), sizes)
    for size in (*sizes.decode(), *sizes.verify(), *sizes.mixed(), sizes.largest):
        arrays.fill(Step(0), size)
        assert arrays.size == size and arrays.cu_q[-1] == size.tokens
        assert arrays.kv_lens.max() <= context
        assert not arrays.block_tables[0].any()
    assert sizes.largest.tokens == min(100, 3 * context)


def test_every_step_has_a_size_that_is_compiled_before():
    limits = Limits(step_tokens=40, max_running=6, context=64)
    sizes = StepSizes(limits, 2, (1, 2, 4))
    known = {*sizes.decode(), *sizes.verify(), *sizes.mixed()}
    shapes = {(size.batch, size.tokens) for size in known}
    rows = {(size.batch, size.rows) for size in known}
    for batch in range(1, 7):
        for tokens in range(batch, 41):
            for num_rows in range(0, min(3 * batch, tokens) + 1):
                step = Step(0, [], [], tokens, num_rows)
                request = Request("", [1])
                for i in range(batch):
                    size = 1 if i else tokens - batch + 1
                    step.chunks.append(ScheduledChunk(request, 0, [1] * size, [], 0, 0, -1, 0))
                padded = sizes.of(step)
                assert (padded.batch, padded.tokens) in shapes
                assert (padded.batch, padded.rows) in rows
                assert all(a <= b for a, b in zip(Size.of(step), padded, strict=True))
                assert all(a <= b for a, b in zip(padded, sizes.largest, strict=True))
                assert padded.tokens == tokens or padded.batch > batch
    assert sizes.tokens == [16, 32, 40] and sizes.batches == [1, 2, 4, 6]


def test_every_step_without_prompts_has_the_size_of_a_graph():
    """Whatever its requests draft, up to the limit of tokens in a step."""
    limits, request = Limits(step_tokens=16, max_running=6, context=64), Request("", [1])
    request.table = BlockTable(np.zeros((1, 16), np.int32), [], [0])
    sizes = StepSizes(limits, 2, (1, 2, 4))
    assert [size.tokens for size in sizes.verify()] == [3, 6, 12]  # 18 tokens are too many
    arrays = StepArrays(BlockManager([LayerGroup("all", 9)], 4, 16), sizes)
    for batch in range(1, 5):
        for drafts in itertools.product(range(3), repeat=batch):
            step = Step(0)
            for count in drafts:
                tokens = [1] * (1 + count)
                step.add(ScheduledChunk(request, 0, tokens, tokens[1:], 1 + count, 0, -1, 0))
            padded = sizes.of(step)
            assert padded in (sizes.verify() if any(drafts) else sizes.decode())
            arrays.fill(step, padded)
            assert arrays.cu_q[-1] == padded.tokens and np.diff(arrays.cu_q).max() <= padded.max_q


def test_buffers_come_from_the_caller():
    made = []

    def allocate(shape, dtype):
        made.append(np.zeros(shape, dtype))
        return made[-1]

    served = engine()
    arrays = StepArrays(served.manager, StepSizes(served.limits, 3, ()), allocate)
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
    scheduler = Scheduler(manager, limits)
    arrays = StepArrays(manager, StepSizes(limits, 0, ()))
    common = dice.choices(range(1000), k=40)
    buffers = [*arrays._by_token.values(), *arrays._by_row.values(), arrays._entries]
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
