"""Pipelining between kernels and blocks: streams, clusters, and what lies between launches."""

from kernelcat.report.techniques.code import Instruction, Launch
from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.measured import SLOWER, Effect, Kept
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "Inter-kernel pipelining",
    (
        Technique(
            "CUDA streams",
            "Work in one stream runs in order, work in two may overlap. Calls run on the caller's "
            "current stream, whichever library owns it, and each stream has workspaces of its own.",
            "NVIDIA, CUDA C++ Programming Guide, Streams",
            (
                Test("tests/test_arrays.py::test_streams_of_every_library_have_a_handle"),
                Test("tests/test_launcher.py::test_each_stream_keeps_one_separate_workspace"),
                Test("tests/test_dispatch_gpu.py::test_the_callers_stream_is_honoured"),
            ),
            modules=("kernelcat/call/arrays.py", "kernelcat/runtime/launcher.py"),
        ),
        Technique(
            "Stream events",
            "An event marks a point of a stream: the host waits for it, or the time between two "
            "is read. The engine records one behind the tokens of each step, and goes on planning.",
            "NVIDIA, CUDA C++ Programming Guide, Events",
            (
                Test(
                    "tests/test_moe_ends.py::test_a_step_is_planned_before_the_tokens_of_the_step_"
                    "before_are_known"
                ),
                Test(
                    "tests/test_moe_engine_gpu.py::"
                    "test_overlapped_steps_write_the_tokens_of_steps_one_by_one"
                ),
            ),
            modules=("kernelcat/moe/engine/runner.py", "kernelcat/bench/timer.py"),
        ),
        Technique(
            "Async H2D and D2H transfers",
            "Copies from and to pinned host memory run beside kernels. All arrays of a step are in "
            "one pinned buffer, so a step is one copy to the device; tokens come back by another.",
            "NVIDIA, CUDA C++ Best Practices Guide, Asynchronous and Overlapping Transfers",
            (
                Test("tests/test_moe_step_arrays.py::test_buffers_come_from_the_caller"),
                Test(
                    "tests/test_moe_engine_gpu.py::"
                    "test_overlapped_steps_write_the_tokens_of_steps_one_by_one"
                ),
            ),
            modules=("kernelcat/moe/engine/step_buffers.py", "kernelcat/moe/engine/runner.py"),
            aliases=("Pinned memory",),
        ),
        Technique(
            "Cooperative Groups",
            "A C++ interface names groups of threads, from parts of a warp to the whole grid, "
            "which can wait for each other.",
            "NVIDIA, CUDA C++ Programming Guide, Cooperative Groups",
            does_not_apply="teams of warps, blocks and clusters synchronize by named barriers, "
            "mbarriers and cluster barriers directly, and no kernel waits for its whole grid.",
        ),
        Technique(
            "Last block finishes",
            "Blocks count their arrivals in memory, and the one that comes last does what needs "
            "all parts: merging, summing, making maps. It saves a launch without a barrier of the "
            "grid.",
            "NVIDIA, CUDA samples, threadFenceReduction",
            (
                Instruction(
                    "ATOMG.E.ADD",
                    ("fp8_gemm/cuda/wgmma", "lm_head/cuda/mma", "flashmla/cuda/mma"),
                ),
                Kept("flashmla/triton/split", "merge", ("last",)),
                Test("tests/test_triton_kernels.py::test_split_k_leaves_its_counters_at_zero"),
            ),
            modules=("kernels/cuda/include/kernelcat/split_k.cuh",),
        ),
        Technique(
            "Thread Block Clusters",
            "On Hopper up to 8 blocks, or 16 by request, run at the same time on neighbouring SMs "
            "and can wait for each other. A row of logits or the keys of one sequence are spread "
            "over a cluster and merged within.",
            "NVIDIA, CUDA C++ Programming Guide, Thread Block Clusters",
            (
                Instruction("UCGABAR"),
                Launch("sample/cuda/cluster", "greedy-1x201088", "cluster"),
                Effect("paged_attn", "decode-1x8192-64/8x64-p16", "cute/cluster", "cute/split"),
                Kept("sample/cuda/cluster", "cluster", (8, 16)),
            ),
            aliases=("2-8 CTA Thread Block Clusters",),
        ),
        Technique(
            "DSMEM (Distributed Shared Memory)",
            "Blocks of a cluster read and write each other's shared memory. Partial results of "
            "attention merge through it; handing on whole operand tiles costs more than loading "
            "them twice.",
            "NVIDIA, CUDA C++ Programming Guide, Distributed Shared Memory",
            (
                Instruction("STAS"),
                Instruction("UBLKCP.S.S"),
                Effect("multicast_gemm", "4097x5000x2056", "cuda/dsmem", "cuda/multicast", SLOWER),
                Effect("flashmla", "32x1-128-32768", "cuda/pair", "cuda/wgmma", SLOWER),
            ),
        ),
        Technique(
            "Clusters that fit the chip",
            "A graphics processing cluster has at most 18 SMs, some of them switched off. Grids of "
            "large clusters that ignore this run a second wave and take twice the time.",
            "NVIDIA, CUDA driver API, cuOccupancyMaxActiveClusters",
            (
                Test(
                    "tests/test_multicast.py::test_clusters_of_four_leave_the_odd_sms_of_a_gpc_idle"
                ),
                Test("tests/test_nvfp4_cuda.py::test_splits_of_k_are_one_wave_of_clusters"),
            ),
        ),
        Technique(
            "Fewer launches by fusion",
            "A kernel costs a microsecond or two before its first byte, which is much of a small "
            "step. Entries take neighbouring operations in: norm and quantization, rotation and "
            "cache write, routing and products.",
            "Own work; compare Spector et al., Look Ma, No Bubbles! (Hazy Research, 2025)",
            (
                Launch("kv_write/cuda/vectorized", "prefill-8192-32/8x128-fp8", "few launches"),
                Effect("kv_write", "prefill-8192-32/8x128-fp8", "cuda/vectorized", "peer/torch"),
                Test("tests/test_moe_served.py::test_a_layer_of_gpt_oss_is_few_launches"),
            ),
        ),
        Technique(
            "Compute and communication overlap",
            "Parts of a product are sent to other GPUs while the rest is computed. Long steps are "
            "computed in halves, with some SMs for exchanges and the others for products.",
            "Wang et al., Overlap Communication with Dependent Computation (ASPLOS, 2023)",
            (
                Test("tests/test_moe_halves.py::test_halves_of_a_layer_have_the_bits_of_the_whole"),
                Test("tests/test_moe_halves_gpu.py::test_an_exchange_runs_beside_a_product"),
            ),
            modules=("kernelcat/moe/parallel/halves.py",),
        ),
        Technique(
            "NCCL collectives",
            "A library of all-reduce, all-gather and other exchanges among GPUs.",
            "NVIDIA, NCCL documentation",
            not_yet="models run on one GPU.",
        ),
        Technique(
            "CUDA-aware MPI",
            "An MPI library takes device pointers and sends without a copy on the host.",
            "Open MPI documentation, CUDA support",
            not_yet="models run on one GPU.",
        ),
        Technique(
            "NVSHMEM puts and gets",
            "A kernel writes into another GPU's memory, without a call on the host.",
            "NVIDIA, NVSHMEM documentation",
            not_yet="models run on one GPU.",
        ),
    ),
)
