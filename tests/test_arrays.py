"""Descriptions of arrays, streams and signatures of NumPy, torch, CuPy and DLPack producers."""

from __future__ import annotations

import numpy as np
import pytest

from kernelcat.call import arrays, torch_guards
from kernelcat.call.arrays import ArrayInfo
from kernelcat.errors import InvalidArgument, MissingDependency

torch = pytest.importorskip("torch")


def test_numpy_and_torch_arrays_have_equal_descriptions() -> None:
    plain = np.zeros((4, 6), np.float16)[:, :5]
    info = arrays.describe(plain)
    assert info == ArrayInfo(plain.ctypes.data, (4, 5), (6, 1), "float16", "cpu", "numpy")
    shared = torch.from_numpy(plain)
    assert arrays.describe(shared) == ArrayInfo(
        plain.ctypes.data, (4, 5), (6, 1), "float16", "cpu", "torch"
    )


def test_an_element_type_that_numpy_lacks_has_its_name() -> None:
    assert arrays.describe(torch.empty(2, dtype=torch.bfloat16)).dtype == "bfloat16"


def test_a_meta_tensor_is_described_without_an_address() -> None:
    info = arrays.describe(torch.empty(3, 4, device="meta", dtype=torch.float16))
    assert (info.pointer, info.shape, info.device) == (0, (3, 4), "meta")
    assert info.cuda_index is None


def test_a_fake_tensor_is_a_wrapper_and_its_address_is_never_read(recwarn) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3, 4, device="cuda:1", dtype=torch.float16)
        info = arrays.describe(fake)
    assert arrays.is_wrapper(fake)
    assert (info.pointer, info.cuda_index) == (0, 1)
    assert not recwarn.list
    assert not arrays.is_wrapper(torch.nn.Parameter(torch.empty(1)))
    assert not arrays.is_wrapper(np.empty(1))


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [
        ((4, 8), (8, 1), True),
        ((4, 8), (9, 1), False),
        ((4, 8), (1, 4), False),
        ((1, 8), (99, 1), True),
        ((4, 1), (1, 77), True),
        ((0, 8), (3, 3), True),
        ((), (), True),
    ],
)
def test_contiguous_ignores_strides_of_axes_with_one_element(
    shape, strides, contiguous: bool
) -> None:
    assert ArrayInfo(0, shape, strides, "float16", "cpu", "torch").contiguous is contiguous


def test_contiguous_agrees_with_torch() -> None:
    base = torch.empty(3, 4, 5)
    views = [base, base[1:], base[:, 1:], base.transpose(0, 1), base[:, :1], base[:0], base[..., 2]]
    for view in views:
        assert arrays.describe(view).contiguous is view.is_contiguous()


@pytest.mark.parametrize("value", [3, 2.5, "a", [1, 2], None, object()])
def test_the_error_of_a_value_that_is_no_array_names_its_type(value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"not {type(value).__name__}$"):
        arrays.describe(value)


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"to_dense\(\)$"):
        arrays.describe(torch.eye(3).to_sparse())


def test_alignment_is_sixteen_bytes() -> None:
    base = torch.empty(64, dtype=torch.bfloat16)
    start = (-base.data_ptr() // 2) % 8
    assert arrays.describe(base[start:]).aligned
    assert arrays.describe(base[start + 8 :]).aligned
    assert not arrays.describe(base[start + 1 :]).aligned


def test_the_key_distinguishes_types_shapes_strides_and_presence() -> None:
    scan = arrays.torch().scan
    plain = torch.empty(4, 4, dtype=torch.float16)
    different = [
        plain,
        plain.float(),
        plain.t(),
        plain[:2],
        plain.view(2, 8),
        torch.nn.Parameter(plain),
        plain.to("meta"),
        None,
    ]
    keys = [scan((array, plain))[0] for array in different if array is None or not array.is_meta]
    assert len(set(keys)) == len(keys)
    key, pointers = scan((plain, None))
    assert pointers == [plain.data_ptr(), 0]
    assert key == scan((plain.clone(), None))[0]
    assert scan((plain, None))[0] != scan((None, plain))[0]


def test_the_matcher_accepts_equal_signatures_only() -> None:
    library = arrays.torch()
    plain = torch.empty(4, 8, dtype=torch.float16)
    matches = library.matcher((plain, plain[:2]))
    assert matches is not None
    assert matches(plain.clone(), plain[2:])
    for other in (plain[:2], plain.t(), plain.bfloat16(), torch.nn.Parameter(plain), None):
        assert not matches(other, plain[:2])
        assert not matches(plain, other) or (other is not None and other.shape == (2, 8))


def test_a_guard_that_fails_its_self_test_is_not_used() -> None:
    def fake(**methods):
        guards = type("guards", (), {"TensorGuards": type("Guard", (), methods)})
        place = type("C", (), {"_dynamo": type("dynamo", (), {"guards": guards})})
        attributes = {"_C": place, "nn": torch.nn, "empty": staticmethod(torch.empty)}
        return type("torch", (), attributes)

    class Always:
        def __init__(self, *arrays, **sizes) -> None: ...

        def check(self, *arrays) -> bool:
            return True

    assert torch_guards.find(torch) is not None
    assert torch_guards.find(fake()) is None
    assert torch_guards.find(fake(**vars(Always))) is None
    assert torch_guards.find(object()) is None


def test_addresses_refuses_arrays_that_are_not_aligned() -> None:
    base = half_at(0)
    assert arrays.torch().addresses((base, base)) == [base.data_ptr()] * 2
    with pytest.raises(InvalidArgument):
        arrays.torch().addresses((base, half_at(1)))


def half_at(offset: int) -> torch.Tensor:
    base = torch.empty(32, dtype=torch.float16)
    return base[(-base.data_ptr() // 2) % 8 + offset :]


def test_the_key_distinguishes_aligned_from_offset_arrays() -> None:
    base = torch.empty(64, dtype=torch.bfloat16)
    start = (-base.data_ptr() // 2) % 8
    scan = arrays.torch().scan
    first, second, offset = base[start:][:16], base[start + 8 :][:16], base[start + 1 :][:16]
    assert scan((first,))[0] == scan((second,))[0] != scan((offset,))[0]


class CpuProducer:
    """A DLPack producer of a library without an adapter, with its memory on the CPU."""

    def __dlpack__(self, **options: object) -> object:
        raise AssertionError("must not be exported")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class CudaProducer(CpuProducer):
    """A DLPack producer of a library without an adapter, with its memory on a CUDA device."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_a_foreign_array_on_the_cpu_is_refused() -> None:
    assert arrays.is_foreign(CpuProducer())
    assert not arrays.is_foreign(torch.empty(1))
    assert not arrays.is_foreign(np.empty(1))
    with pytest.raises(InvalidArgument, match="on the CPU; move it to a CUDA device"):
        arrays.from_dlpack(CpuProducer())


def test_a_foreign_array_needs_cupy(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(MissingDependency, match=r"pip install 'kernelcat\[cupy\]'"):
        arrays.from_dlpack(CudaProducer())


def test_outputs_are_converted_by_the_array_namespace_of_the_inputs() -> None:
    """NumPy plays the foreign library: like JAX, its array namespace has ``from_dlpack``."""
    result = arrays.to_producer(torch.arange(3), like=np.empty(1))
    assert isinstance(result, np.ndarray) and result.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (7, 7),
        (type("Torch", (), {"cuda_stream": 11})(), 11),
        (type("Cupy", (), {"ptr": 12})(), 12),
        (type("Core", (), {"__cuda_stream__": lambda self: (0, 13)})(), 13),
    ],
)
def test_streams_of_every_library_have_a_handle(stream: object, handle: int) -> None:
    assert arrays.stream_handle(stream) == handle
    assert arrays.fixed_stream(stream)(0) == handle


def test_the_error_of_a_value_that_is_no_stream_names_its_type() -> None:
    with pytest.raises(InvalidArgument, match=r"not str$"):
        arrays.stream_handle("default")


@pytest.mark.gpu
def test_cupy_arrays_are_described_and_allocated() -> None:
    cupy = pytest.importorskip("cupy")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = cupy.empty((4, 6), ml_dtypes.bfloat16)[:, :5]
    assert arrays.describe(array) == ArrayInfo(
        array.data.ptr, (4, 5), (6, 1), "bfloat16", "cuda:0", "cupy"
    )
    allocated = arrays.cupy().allocator((2, 3), "bfloat16", 0)()
    assert (allocated.shape, allocated.dtype.name) == ((2, 3), "bfloat16")
