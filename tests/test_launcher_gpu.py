"""The launcher on a real driver: descriptors, clusters, streams, captures, errors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kernelcat.catalog.implementation import (
    Float32,
    Int32,
    Int64,
    Param,
    Pointer,
    Program,
    Step,
    TensorMap,
)
from kernelcat.errors import LaunchError
from kernelcat.jit.cuda import CudaSource
from kernelcat.runtime.code import Code
from kernelcat.runtime.launcher import Launcher, prepare

KERNELS = """
struct alignas(64) Map { char bytes[128]; };
#define SHARED(p) static_cast<unsigned>(__cvta_generic_to_shared(p))

extern "C" __global__ void axpy(float* out, const float* x, const float* y, int n, float a,
                                long long offset) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a * x[i] + y[i] + static_cast<float>(offset >> 40);
}

// One 64 x 32 box of int32 at column 32, row 16 of a 60 x 40 matrix: past both edges.
extern "C" __global__ void box(int* out, const __grid_constant__ Map map) {
  extern __shared__ __align__(1024) int tile[];
  __shared__ unsigned long long barrier;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SHARED(&barrier)));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 8192;"
                 ::"r"(SHARED(&barrier)) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];"
        ::"r"(SHARED(tile)), "l"(&map), "r"(SHARED(&barrier)), "r"(32), "r"(16) : "memory");
  }
  __syncthreads();
  asm volatile("{ .reg .pred p; wait: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;"
               "@!p bra wait; }" ::"r"(SHARED(&barrier)) : "memory");
  for (int i = threadIdx.x; i < 64 * 32; i += blockDim.x) out[i] = tile[i];
}

extern "C" __global__ void ranks(int* out) {
  int rank, size;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  if (threadIdx.x == 0) out[blockIdx.x] = 100 * size + rank;
}

// Every block adds itself; the last one tells the sum and leaves the counters zero.
extern "C" __global__ void count(int* out, int* counters) {
  if (threadIdx.x != 0) return;
  atomicAdd(&counters[0], static_cast<int>(blockIdx.x));
  __threadfence();
  if (atomicAdd(&counters[1], 1) != static_cast<int>(gridDim.x) - 1) return;
  out[0] = atomicExch(&counters[0], 0);
  counters[1] = 0;
}

extern "C" __global__ void large(int* out) {
  extern __shared__ int tile[];
  int last = 200 * 1024 / 4 - 1;
  tile[last - threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = tile[last - (threadIdx.x ^ 1)];
}

extern "C" __global__ void increment(int* value) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) value[0] += 1;
  asm volatile("griddepcontrol.launch_dependents;");
}
"""
NAMES = ("axpy", "box", "ranks", "count", "large", "increment")


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.cu"
    path.write_text(KERNELS)
    return path


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_kernels_of_this_file_compile(kernels: Path, arch: str) -> None:
    for name in NAMES:
        assert CudaSource(str(kernels), name).compile(arch).kernel == name


class Gpu:
    """Launches the kernels of KERNELS on CuPy arrays."""

    def __init__(self, path: Path) -> None:
        from kernelcat.runtime import gpu

        self.cupy = pytest.importorskip("cupy")
        self.path, self.arch = path, gpu.detect(0).arch

    def load(
        self, kernel: str, params: Sequence[Param], tensors: str, copies: int = 1,
        workspaces: dict[str, int] | None = None, grid: int = 1, block: int = 128, **step: Any,
    ) -> Launcher:  # fmt: skip
        source = CudaSource(str(self.path), kernel)
        steps = (Step(source, (grid, 1, 1), tuple(params), block, **step),) * copies
        code = Code(source.compile(self.arch), 0)
        program = Program(steps, workspaces or {})
        return prepare(f"test/cuda/{kernel}", program, lambda step: code, tuple(tensors), 0)


@pytest.fixture
def gpu(kernels: Path) -> Gpu:
    return Gpu(kernels)


@pytest.mark.gpu
def test_pointers_and_numbers_arrive(gpu: Gpu) -> None:
    cupy = gpu.cupy
    params = [Pointer("o"), Pointer("x"), Pointer("y"), Int32(1000), Float32(2.5), Int64(3 << 40)]
    launch = gpu.load("axpy", params, "xyo", grid=8)
    for seed in range(3):
        x, y = cupy.random.default_rng(seed).standard_normal((2, 1000), dtype="float32")
        out = cupy.zeros(1024, "float32")
        launch((x.data.ptr, y.data.ptr, out.data.ptr), cupy.cuda.get_current_stream().ptr)
        assert cupy.allclose(out[:1000], 2.5 * x + y + 3, atol=1e-5) and not out[1000:].any()


@pytest.mark.gpu
def test_tma_fills_with_zeros_past_the_edges(gpu: Gpu) -> None:
    cupy = gpu.cupy
    matrix = cupy.arange(40 * 60, dtype="int32").reshape(40, 60)
    tensor_map = TensorMap("m", "int32", (60, 40), (240,), (64, 32))
    launch = gpu.load("box", [Pointer("o"), tensor_map], "mo", shared_bytes=8192)
    out = cupy.full((32, 64), -1, "int32")
    launch((matrix.data.ptr, out.data.ptr), 0)
    expected = cupy.zeros((32, 64), "int32")
    expected[:24, :28] = matrix[16:, 32:]
    assert (out == expected).all()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 8, 16])
def test_clusters_of_every_size_start(gpu: Gpu, size: int) -> None:
    out = gpu.cupy.zeros(32, "int32")
    launch = gpu.load("ranks", [Pointer("o")], "o", grid=32, cluster=(size, 1, 1))
    launch((out.data.ptr,), 0)
    assert out.tolist() == [100 * size + block % size for block in range(32)]


@pytest.mark.gpu
def test_large_shared_memory_is_granted(gpu: Gpu) -> None:
    out = gpu.cupy.zeros(128, "int32")
    gpu.load("large", [Pointer("o")], "o", shared_bytes=200 << 10)((out.data.ptr,), 0)
    assert out.tolist() == [i ^ 1 for i in range(128)]


@pytest.mark.gpu
def test_more_shared_memory_than_there_is_says_so_at_load(gpu: Gpu) -> None:
    with pytest.raises(LaunchError, match=r"test/cuda/large: cuFuncSetAttribute: CUDA_ERROR"):
        gpu.load("large", [Pointer("o")], "o", shared_bytes=400 << 10)


@pytest.mark.gpu
def test_two_streams_and_eight_threads_share_no_workspace(gpu: Gpu) -> None:
    cupy = gpu.cupy
    params = [Pointer("o"), Pointer("counters")]
    launch = gpu.load("count", params, "o", grid=300, workspaces={"counters": 8})
    outs = cupy.zeros((8, 50), "int32")
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            cupy.cuda.Device(0).use()
            stream = cupy.cuda.Stream(non_blocking=True) if number % 2 else cupy.cuda.Stream.null
            for turn in range(50):
                launch((outs[number].data.ptr + 4 * turn,), stream.ptr)
            stream.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cupy.cuda.runtime.deviceSynchronize()
    assert errors == [] and (outs == sum(range(300))).all()


@pytest.mark.gpu
def test_a_thread_that_never_used_cuda_can_launch(gpu: Gpu) -> None:
    out = gpu.cupy.zeros(4, "int32")
    launch = gpu.load("ranks", [Pointer("o")], "o", grid=4)
    address = out.data.ptr
    gpu.cupy.cuda.runtime.deviceSynchronize()
    thread = threading.Thread(target=launch, args=((address,), 0))
    thread.start()
    thread.join()
    gpu.cupy.cuda.runtime.deviceSynchronize()
    assert out.tolist() == [100] * 4


@pytest.mark.gpu
def test_a_first_call_inside_a_capture_allocates_and_replays(gpu: Gpu) -> None:
    cupy = gpu.cupy
    params = [Pointer("o"), Pointer("counters")]
    launch = gpu.load("count", params, "o", grid=100, workspaces={"counters": 8}).clone()
    out, stream = cupy.zeros(1, "int32"), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        launch((out.data.ptr,), stream.ptr)
        graph = stream.end_capture()
    assert out.tolist() == [0]
    for _ in range(3):
        out.fill(0)
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        assert out.tolist() == [sum(range(100))]


@pytest.mark.gpu
def test_dependent_launches_keep_their_order(gpu: Gpu) -> None:
    value = gpu.cupy.zeros(1, "int32")
    launch = gpu.load("increment", [Pointer("v")], "v", copies=5, programmatic=True)
    for _ in range(100):
        launch((value.data.ptr,), 0)
    assert value.tolist() == [500]


@pytest.mark.gpu
def test_a_refusal_by_the_real_driver_is_one_line(gpu: Gpu) -> None:
    out = gpu.cupy.zeros(4, "int32")
    launch = gpu.load("ranks", [Pointer("o")], "o", block=2048)
    with pytest.raises(LaunchError, match=r"test/cuda/ranks: CUDA_ERROR_INVALID_VALUE \("):
        launch((out.data.ptr,), 0)
    gpu.load("ranks", [Pointer("o")], "o", grid=4)((out.data.ptr,), 0)
    assert out.tolist() == [100] * 4


@pytest.mark.gpu
def test_code_for_another_architecture_is_refused_at_load(gpu: Gpu) -> None:
    gpu.arch = "sm_100a" if gpu.arch != "sm_100a" else "sm_90a"
    with pytest.raises(LaunchError, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
        gpu.load("ranks", [Pointer("o")], "o")
