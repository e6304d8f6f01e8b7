"""`kernelcat.reference`: the oracles as functions on CPU arrays of NumPy and torch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from campaign import share
from hypothesis import HealthCheck, given, settings

import kernelcat
from kernelcat import catalog, dtypes
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import InvalidArgument, UnknownName
from kernelcat.verify import fuzz, gate


def operands(rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, 64), (7, 64))
    a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    return a.bfloat16(), b.bfloat16()


def test_results_are_rounded_to_the_element_type_of_the_output() -> None:
    a, b = operands()
    d = kernelcat.reference("gemm")(a, b)
    assert d.dtype == torch.bfloat16
    assert torch.equal(d, (a.double() @ b.double().T).bfloat16())


def test_numpy_arrays_give_numpy_arrays() -> None:
    a, b = (x.float().numpy().astype(ml_dtypes.bfloat16) for x in operands())
    d = kernelcat.reference("gemm")(a, b)
    assert isinstance(d, np.ndarray)
    assert d.dtype == ml_dtypes.bfloat16
    expected = kernelcat.reference("gemm")(*operands())
    assert np.array_equal(d.astype("float32"), expected.float().numpy())


def test_float32_arrays_stand_for_16_bits_and_nothing_is_rounded() -> None:
    a, b = (x.float() * 1.001 for x in operands())
    d = kernelcat.reference("gemm")(a, b)
    assert d.dtype == torch.float32
    assert torch.allclose(d, a @ b.T, atol=1e-5)


def test_float32_arrays_are_exact_entries_too() -> None:
    """`embedding` and `lm_head` are judged bit by bit: their oracles take storage arrays."""
    x, table = (x.float() * 1.001 for x in operands())
    rows = kernelcat.reference("embedding")(torch.tensor([6, 0, -1], dtype=torch.int32), table)
    assert torch.equal(rows, torch.stack((table[6], table[0], torch.zeros(64))))
    head = kernelcat.reference("lm_head")
    values, ids, logits = head(x, table, top_k=1, has_logits=True)
    assert torch.allclose(logits, x @ table.T, atol=1e-5)
    assert torch.equal(values[:, 0], logits.amax(1))
    assert torch.equal(ids[:, 0].long(), logits.argmax(1))


def test_no_value_between_two_products_is_rounded_for_float32_arrays() -> None:
    x, router = (x.float() * 1.001 for x in operands())
    norm, wo = torch.full((64,), 0.9), torch.eye(64) * 0.3
    a, logits, h = torch.empty(5, 64), torch.empty(5, 7), x.clone()
    kernelcat.reference("out_router")(x, wo, norm, router, eps=1e-5, out=(a, logits, h))
    expected = torch.nn.functional.rms_norm(1.3 * x, (64,), norm, 1e-5)
    assert torch.allclose(h, 1.3 * x, atol=1e-5) and torch.allclose(a, expected, atol=1e-5)
    assert torch.allclose(logits, expected @ router.T, atol=1e-4)


def test_an_exact_entry_with_two_outputs() -> None:
    x, _ = operands(rows=40)
    q, scale = kernelcat.reference("fp8_quantize")(x, block="1x128")
    assert (q.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    values = q.float() * scale.T
    assert (values - x.float()).abs().max() <= 2**-4 * x.float().abs().max()


def test_out_is_written_in_place() -> None:
    a, b = operands()
    d = torch.empty(5, 7, dtype=torch.bfloat16)
    assert kernelcat.reference("gemm")(a, b, out=d) is d
    assert torch.equal(d, kernelcat.reference("gemm")(a, b))


@pytest.mark.campaign
@pytest.mark.parametrize("name", catalog.names())
def test_every_entry_computes_what_the_gate_expects(name: str) -> None:
    entry = catalog.entry(name)

    @settings(
        max_examples=share(200), deadline=None,
        suppress_health_check=[HealthCheck.filter_too_much],  # few values fit together
    )  # fmt: skip
    @given(problem=fuzz.problems(entry, limit=64))
    def run(problem: Problem) -> None:
        compute_what_the_gate_expects(entry, problem)

    run()


def compute_what_the_gate_expects(entry: Entry, problem: Problem) -> None:
    prepared = gate.prepare(entry, problem, gate_host(), seed=3)
    for expected in prepared.expected.values():  # a race writes other inputs to the buffers
        assert not any(np.may_share_memory(expected, b.view) for b in prepared.buffers.values())
    arrays = {t.name: as_torch(prepared, t, problem) for t in entry.present(problem)}
    outputs = tuple(arrays.get(t.name) for t in entry.outputs)
    inputs = {t.name: arrays[t.name] for t in entry.inputs if t.name in arrays}
    # The arrays are contiguous, whatever strides the problem has.
    read = {t.name for t in entry.inputs} | {s for t in entry.tensors for s in t.strides or ()}
    keywords = {a.name: problem[a.name] for a in entry.axes if a.name not in read}
    oracle = kernelcat.reference(entry.name)
    oracle(**inputs, out=outputs if len(outputs) > 1 else outputs[0], **keywords)
    for tensor, output in zip(entry.outputs, outputs, strict=True):
        if output is None:
            assert not tensor.present(problem)
            continue
        verdict = prepared._compare(tensor, from_torch(output, tensor.dtype_of(problem)))
        assert verdict.passed, verdict.detail


def gate_host() -> object:
    from types import SimpleNamespace

    return SimpleNamespace(xp=np, gpu=None)


def as_torch(prepared: gate.Prepared, tensor, problem) -> torch.Tensor:
    """The buffer of ``tensor`` as a torch tensor that shares its memory; outputs become zeros."""
    view = prepared.arrays[tensor.name]
    if tensor in prepared.entry.outputs and not tensor.updated:
        view = np.zeros_like(view)
    integers = torch.from_numpy(np.array(view).view(f"int{8 * view.dtype.itemsize}"))
    return integers.view(getattr(torch, tensor.dtype_of(problem)))


def from_torch(array: torch.Tensor, dtype: str) -> np.ndarray:
    integers = array.view(getattr(torch, f"int{8 * array.element_size()}")).numpy()
    return integers.view(dtypes.STORAGE[dtype])


def test_errors_name_the_array_and_the_way_out() -> None:
    a, b = operands()
    oracle = kernelcat.reference("gemm")
    with pytest.raises(InvalidArgument, match=r'kernelcat.get\("gemm"\) takes arrays on a GPU'):
        oracle(a.to("meta"), b)
    with pytest.raises(InvalidArgument, match="K differs"):
        oracle(a[:, :32].contiguous(), b)
    with pytest.raises(UnknownName):
        kernelcat.reference("gem")


def test_a_call_on_cpu_arrays_names_the_oracle() -> None:
    a, b = operands()
    with pytest.raises(InvalidArgument, match=r'kernelcat.reference\("gemm"\)'):
        kernelcat.get("gemm")(a, b)
