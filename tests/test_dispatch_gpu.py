"""Calls of real kernels: values, streams, graph capture, views, and other array libraries."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest

import kernelcat
from kernelcat.errors import InvalidArgument
from kernelcat.store import workload

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:there is no tuning database"),
]


def cuda(*shape: int, dtype=None) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype or torch.bfloat16)


def close(d, a, b, bias=None) -> bool:
    expected = a.float() @ b.float().t()
    expected = expected if bias is None else expected + bias.float()
    return torch.allclose(d.float(), expected, rtol=2**-7, atol=0.05)


@pytest.mark.parametrize("m,n,k", [(256, 128, 64), (300, 200, 72), (1, 7, 5), (0, 8, 8), (8, 8, 0)])
def test_calls_give_right_results(m: int, n: int, k: int) -> None:
    op, a, b, bias = kernelcat.get("gemm"), cuda(m, k), cuda(n, k), cuda(n)
    d = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert close(op(a, b), a, b)
    assert op(a, b, bias, out=d) is d and close(d, a, b, bias)


@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu"])
def test_epilogues_come_with_the_call(activation: str) -> None:
    op, a, b, bias = kernelcat.get("gemm"), cuda(96, 128), cuda(256, 128), cuda(256)
    z = a.float() @ b.float().t() / 128**0.5 + bias.float()
    silu = torch.nn.functional.silu
    expected = {
        "silu": lambda: silu(z),
        "gelu": lambda: torch.nn.functional.gelu(z),
        "swiglu": lambda: silu(z[:, ::2]) * z[:, 1::2],
    }[activation]()
    residual = torch.randn_like(expected).to(torch.bfloat16)
    d = op(a, (b / 128**0.5).to(torch.bfloat16), bias, residual, activation=activation)
    assert d.shape == expected.shape
    assert torch.allclose(d.float(), expected + residual.float(), rtol=2**-6, atol=0.05)


def test_a_linear_layer_in_float8() -> None:
    """Quantized as torch tensors, multiplied, and compared with the exact product."""
    quantize, product = kernelcat.get("fp8_quantize"), kernelcat.get("fp8_gemm")
    x, w = cuda(200, 512), cuda(384, 512) / 512**0.5
    a, a_scale = quantize(x, block="1x128")
    b, b_scale = quantize(w, block="128x128")
    assert (a.dtype, a_scale.shape, b_scale.shape) == (torch.float8_e4m3fn, (4, 200), (3, 4))
    d = product(a, a_scale, b, b_scale)
    exact = x.float() @ w.float().t()
    assert d.dtype == torch.bfloat16
    assert (d.float() - exact).norm() / exact.norm() < 0.05


def test_the_callers_stream_is_honoured() -> None:
    """A long kernel on the side stream precedes the kernel that writes the inputs."""
    op, a, b, d = kernelcat.get("gemm"), cuda(512, 512), cuda(512, 512), cuda(512, 512)
    op(a, b, out=d)
    bound = op.bind(a, b, out=d)
    side = torch.cuda.Stream()
    for run in (lambda: op(a, b, out=d), bound, op.bind(a, b, out=d, stream=side)):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            a.normal_()
            run()
            after = d.clone()
        side.synchronize()
        assert close(after, a, b)


def test_bind_is_captured_and_replays_on_new_data() -> None:
    op, a, b, d = kernelcat.get("gemm"), cuda(256, 256), cuda(256, 256), cuda(256, 256)
    run = op.bind(a, b, out=d)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        a.normal_()
        d.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert close(d, a, b)


def test_offset_views_and_sub_tiles() -> None:
    op, base, b = kernelcat.get("gemm"), cuda(64 * 64 + 1), cuda(64, 64)
    a = base[1:].view(64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert close(op(a, b), a, b)
    copy, matrix = kernelcat.get("tma_copy"), cuda(128, 256)
    left, right = matrix[:, :128], matrix[:, 128:]
    copy(left, out=right)
    assert torch.equal(left, right)
    assert torch.equal(copy(right), right)
    with pytest.raises(InvalidArgument, match="out shares memory with src"):
        copy(left, out=matrix[:, 64:192])


def test_cupy_in_cupy_out_on_its_stream() -> None:
    cupy = pytest.importorskip("cupy")
    op = kernelcat.get("gemm")
    a, b = (cupy.random.randn(256, 128).astype(cupy.float16) for _ in range(2))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        a += 1
        d = op(a, b)
        stream.synchronize()
    assert isinstance(d, cupy.ndarray) and d.dtype == cupy.float16
    exact = a.astype("f4") @ b.astype("f4").T
    assert cupy.allclose(d.astype("f4"), exact, rtol=2**-7, atol=0.1)


def test_another_dlpack_producer() -> None:
    """A wrapper hides CuPy arrays, so that inputs and outputs pass through DLPack."""
    cupy = pytest.importorskip("cupy")

    class Wrapper:
        def __init__(self, array) -> None:
            self.array = array

        def __dlpack__(self, **options: object) -> object:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

        def __array_namespace__(self):
            wrap = staticmethod(lambda array: Wrapper(cupy.from_dlpack(array)))
            return type("Namespace", (), {"from_dlpack": wrap})

    a, b = (cupy.random.randn(64, 64).astype(cupy.float16) for _ in range(2))
    d = kernelcat.get("gemm")(Wrapper(a), Wrapper(b))
    assert isinstance(d, Wrapper)
    exact = a.astype("f4") @ b.astype("f4").T
    assert cupy.allclose(d.array.astype("f4"), exact, rtol=2**-7, atol=0.1)


def test_jax_in_jax_out() -> None:
    """Runs in a separate process: by default JAX reserves most of the GPU's memory."""
    pytest.importorskip("jax")
    code = """
import jax, jax.numpy as jnp, kernelcat
a, b = (jax.random.normal(jax.random.key(i), (256, 128), jnp.bfloat16) for i in range(2))
op = kernelcat.get("gemm")
for _ in range(3):
    d = op(a, b)
assert isinstance(d, jax.Array) and d.dtype == jnp.bfloat16
exact = a.astype("float32") @ b.astype("float32").T
assert jnp.allclose(d.astype("float32"), exact, rtol=2**-6, atol=0.1)
try:
    op(a, b, out=d)
except kernelcat.KernelcatError as error:
    print(error)
"""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "out must be a torch or CuPy array" in done.stdout


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda op, a, b: op(a.cpu(), b), "a is on the CPU"),
        (lambda op, a, b: op(a, b.cpu()), "b is on the CPU"),
        (lambda op, a, b: op(a, b, out=a.cpu()), "out is on the CPU"),
        (lambda op, a, b: op(a.t()[:32], b), "a is not contiguous"),
    ],
)
def test_bad_arguments(call, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        call(kernelcat.get("gemm"), cuda(64, 64), cuda(64, 64))


def test_mixed_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    a, b = cuda(64, 64), cuda(64, 64)
    with pytest.raises(InvalidArgument, match="a is on cuda:0 but b is on cuda:1"):
        kernelcat.get("gemm")(a, b.to("cuda:1"))
    there = a.to("cuda:1"), b.to("cuda:1")
    d = kernelcat.get("gemm")(*there)  # while cuda:0 is current
    torch.cuda.synchronize(1)
    assert d.device.index == 1 and close(d, *there)


def test_captured_calls_are_recorded_as_captured(tmp_path) -> None:
    """Two calls while a stream is captured, and one each on the default and on another stream."""
    op, a, b, path = kernelcat.get("gemm"), cuda(96, 128), cuda(64, 128), tmp_path / "w.jsonl"
    d, e = cuda(96, 64), cuda(96, 64)
    op(a, b, out=d)
    with kernelcat.record(path):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            op(a, b, out=d)
            op(a, b, out=d)
        for _ in range(3):
            graph.replay()
        op(a, b, out=e)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            op(a, b, out=e)
    torch.cuda.synchronize()
    [use] = workload.read(path)
    assert (use.calls, use.captured) == (2, 2) and use.gpu and use.us > 0
    assert close(d, a, b) and close(e, a, b)


def test_the_torch_operator_is_recorded_once(tmp_path) -> None:
    a, b, path = cuda(96, 128), cuda(64, 128), tmp_path / "w.jsonl"
    kernelcat.get("gemm")
    with kernelcat.record(path):
        for _ in range(5):
            torch.ops.kernelcat.gemm(a, b)
    assert [use.calls for use in workload.read(path)] == [5]
