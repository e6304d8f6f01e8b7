"""Outputs that are updated in place: in the verification gate, in calls, and as torch operators."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import kernelcat
from kernelcat import catalog, dtypes
from kernelcat.catalog.spec import EXACT, Entry, Problem
from kernelcat.errors import InvalidArgument
from kernelcat.reference.kv_write import FP8, appended
from kernelcat.runtime import gpu
from kernelcat.verify import gate

HOST = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)
ENTRY = catalog.entry("kv_write")
PROBLEM = appended(2, 4, 2, 64, context=20, q_len=3, kv_dtype=FP8, has_scales=True)


def prepared(entry: Entry = ENTRY, problem: Problem = PROBLEM) -> gate.Prepared:
    return gate.prepare(entry, problem, HOST, seed=3)


def written(case: gate.Prepared) -> dict[str, np.ndarray]:
    """The arrays that the outputs hold after a right run."""
    arrays = {}
    for tensor in case.entry.outputs:
        new = dtypes.encode(case.expected[tensor.name], tensor.dtype_of(case.problem))
        if tensor.updated:
            new = np.where(case.kept[tensor.name], case.pristine[tensor.name], new)
        arrays[tensor.name] = new
    return arrays


def judge(case: gate.Prepared, spoil: Callable[[dict], None] = lambda arrays: None):
    def body(arrays: dict) -> None:
        for name, values in written(case).items():
            arrays[name][...] = values
        spoil(arrays)

    return case.verify(lambda arrays: lambda: body(arrays))


def new_slot(case: gate.Prepared) -> tuple[int, ...]:
    return tuple(np.argwhere(~case.kept["k_cache"])[0])


def old_slot(case: gate.Prepared) -> tuple[int, ...]:
    return tuple(np.argwhere(case.kept["k_cache"])[0])


def leaves_a_new_slot(case, arrays):
    arrays["k_cache"][new_slot(case)] = case.pristine["k_cache"][new_slot(case)]


def flips_a_bit_of_an_old_slot(case, arrays):
    arrays["k_cache"][old_slot(case)] ^= 1


def poisons_old_slots(case, arrays):
    arrays["v_cache"][case.kept["v_cache"]] = 0xFF


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (leaves_a_new_slot, r"k_cache: 1 of \d+ elements off, first at .*: nan instead of"),
        (flips_a_bit_of_an_old_slot, "k_cache: 1 elements changed that must stay"),
        (poisons_old_slots, r"v_cache: \d+ elements changed that must stay"),
    ],
)
def test_only_new_slots_may_change_and_all_must(spoil, message: str) -> None:
    case = prepared()
    assert judge(case).passed
    verdict = judge(case, lambda arrays: spoil(case, arrays))
    assert not verdict.passed and re.search(message, verdict.detail), verdict


def test_an_old_slot_that_is_nan_must_keep_its_bits() -> None:
    def make_inputs(problem, normal):
        return {**ENTRY.make_inputs(problem, normal), "v_cache": np.full(shape, np.nan, "float32")}

    shape = ENTRY.outputs[2].shape_of(PROBLEM)
    case = prepared(replace(ENTRY, make_inputs=make_inputs))
    assert judge(case).passed
    at = tuple(np.argwhere(case.kept["v_cache"])[0])

    def spoil(arrays):
        arrays["v_cache"][at] ^= 0x80

    assert judge(case, spoil).detail == "v_cache: 1 elements changed that must stay as they were"


def test_every_run_starts_from_the_drawn_arrays() -> None:
    case = prepared()
    assert judge(case).passed
    verdict = case.verify(lambda arrays: lambda: arrays["q_out"].fill(0))
    assert not verdict.passed
    for name in ("k_cache", "v_cache"):
        assert np.array_equal(case.arrays[name], case.pristine[name])


def test_an_updated_output_of_an_exact_entry_is_compared_by_bits() -> None:
    """The oracle of an exact entry returns every element as it is stored."""
    copy = catalog.entry("tma_copy")
    problem = copy.problem(rows=5, cols=7, src_stride=9, dst_stride=8, dtype="float16")

    def oracle(problem, arrays):
        dst = arrays["dst"].copy()
        dst[1] = arrays["src"][1]
        return {"dst": dst}

    def make_inputs(problem, normal):
        return {**copy.make_inputs(problem, normal), "dst": normal((5, 7))}

    entry = replace(
        copy, outputs=(replace(copy.outputs[0], updated=True),), oracle=oracle,
        make_inputs=make_inputs,
    )  # fmt: skip
    case = prepared(entry, problem)
    assert entry.tolerance_of(problem) == EXACT

    def row(index: int):
        def body(arrays):
            arrays["dst"][index] = arrays["src"][index]

        return case.verify(lambda arrays: lambda: body(arrays))

    assert row(1).passed and not row(0).passed


def test_copies_for_timing_hold_the_drawn_arrays() -> None:
    first, second = gate.allocate(ENTRY, PROBLEM, HOST, seed=3, copies=2)
    pristine = prepared().pristine
    for arrays in (first, second):
        assert np.array_equal(arrays["k_cache"], pristine["k_cache"])
    first["k_cache"].fill(0)
    assert np.array_equal(second["k_cache"], pristine["k_cache"])


# ---- calls ----------------------------------------------------------------------------------


def tensors() -> dict:
    torch = pytest.importorskip("torch")
    kinds = {"uint8": torch.float8_e4m3fn, "uint16": torch.bfloat16}
    views = {}
    for name, array in prepared().arrays.items():
        signed = array.view("int16") if array.dtype == "uint16" else array
        views[name] = torch.from_numpy(signed.copy())
        if str(array.dtype) in kinds:
            views[name] = views[name].view(kinds[str(array.dtype)])
    return views


def test_updated_outputs_must_be_passed() -> None:
    arrays = tensors()
    inputs = {
        name: array for name, array in arrays.items() if name in [t.name for t in ENTRY.inputs]
    }
    op = kernelcat.get("kv_write")
    message = r"kv_write updates k_cache and v_cache in place: pass out=\(q_out, k_cache, v_cache\)"
    for call in (op, op.bind, op.plan, op.explain):
        with pytest.raises(InvalidArgument, match=message):
            call(**inputs)


def test_the_shape_and_type_of_an_updated_output_become_axes() -> None:
    arrays = tensors()
    inputs = {
        name: array for name, array in arrays.items() if name in [t.name for t in ENTRY.inputs]
    }
    out = tuple(arrays[t.name] for t in ENTRY.outputs)
    explained = kernelcat.get("kv_write").explain(**inputs, out=out, gpu="h200")
    assert explained.problem == PROBLEM


# ---- torch operators ------------------------------------------------------------------------


def test_the_schema_marks_mutated_arguments() -> None:
    torch = pytest.importorskip("torch")
    from kernelcat.call import torch_operators

    kernelcat.get("kv_write")
    schema = torch_operators.schema(ENTRY, mutating=True)
    assert schema.endswith(
        '*, str style="neox", bool page_scales=False, str lengths="equal", '
        'Tensor(a!) q_out, Tensor(b!) k_cache, Tensor(c!) v_cache, str pin="") -> ()'
    )
    torch._C.parse_schema(f"kernelcat::x{schema}")
    assert not hasattr(
        torch.ops.kernelcat, "kv_write"
    )  # this overload would have to allocate the caches


def test_a_compiled_graph_updates_the_callers_arrays() -> None:
    torch = pytest.importorskip("torch")
    op, arrays = kernelcat.get("kv_write"), tensors()

    def kernel(q, k, v, *more, q_out, k_cache, v_cache, **axes):
        q_out.copy_(q)
        k_cache.view(torch.uint8)[0].add_(1)

    library = torch.library.Library("kernelcat", "IMPL")
    library.impl("kv_write_out", kernel, "CPU")
    inputs = [arrays[t.name] for t in ENTRY.inputs]
    out = tuple(arrays[t.name] for t in ENTRY.outputs)
    before = out[1].clone().view(torch.uint8)

    def step(inputs, out):
        op(*inputs, out=out)
        return out[0] + 1

    try:
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(inputs, out), inputs[0] + 1)
    finally:
        library._destroy()
        torch._dynamo.reset()
    after = out[1].view(torch.uint8)
    assert torch.equal(after[0], before[0] + 1) and torch.equal(after[1:], before[1:])


def test_a_compiled_graph_cannot_allocate_an_updated_output() -> None:
    torch = pytest.importorskip("torch")
    op, arrays = kernelcat.get("kv_write"), tensors()
    inputs = [arrays[t.name] for t in ENTRY.inputs]
    with pytest.raises(Exception, match="pass out="):
        torch.compile(lambda *inputs: op(*inputs), fullgraph=True, backend="eager")(*inputs)
    torch._dynamo.reset()


def updating(entry: Entry) -> Problem:
    """A small named problem of ``entry`` with all its updated outputs, as few as possible rows."""
    every = [p for p in entry.problems.values() if all(t.present(p) for t in entry.updated)]
    return min(every, key=entry.bytes_moved)


@pytest.mark.parametrize(
    "entry", [e for e in map(catalog.entry, catalog.names()) if e.updated], ids=lambda e: e.name
)
def test_an_output_that_a_second_run_changes_again_is_declared_accumulated(entry: Entry) -> None:
    case = prepared(entry, updating(entry))
    is_exact = entry.tolerance_of(case.problem) == EXACT  # then the oracle takes what is stored
    again = dict(case.pristine if is_exact else gate.decoded(entry, case.problem, case.pristine))
    again |= {tensor.name: case.expected[tensor.name] for tensor in entry.updated}
    twice = entry.oracle(case.problem, again)
    for tensor in entry.updated:
        once = case.expected[tensor.name]
        changes = not np.array_equal(once, twice[tensor.name])
        assert changes == tensor.accumulated, tensor.name
