"""Thread hierarchy and tensor cores: how work is laid over threads, and the units that multiply."""

from kernelcat.report.techniques.code import Instruction
from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.measured import Effect, Kept, Reached
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "Thread hierarchy and tensor cores",
    (
        Technique(
            "Thread, warp and block hierarchy",
            "The same loop can be given to a thread, a warp or a block. A warp reduces by "
            "shuffles without shared memory, a block shares a row, a cluster shares several SMs. "
            "Entries for rows choose by the length of a row: several rows a block where rows are "
            "short.",
            "NVIDIA, CUDA C++ Programming Guide, Thread Hierarchy",
            (
                Effect("attn_merge", "16x16-128x256", "cuda/vectorized", "cuda/naive"),
                Effect("attn_merge", "8x1024-32x128", "triton/tiled", "triton/naive"),
            ),
        ),
        Technique(
            "Grid and block sizing",
            "Blocks must be many enough to fill all SMs and large enough to reuse what they load. "
            "No rule gives the best size for all shapes, so sizes are tuning parameters, and the "
            "tuner races them for each problem.",
            "NVIDIA, CUDA C++ Best Practices Guide, Execution Configuration",
            (
                Kept("rms_norm/cuda/registers", "threads", (256, 512, 1024)),
                Kept("gemm/cuda/wgmma", "tile", ("128x160", "128x192", "128x256", "256x160")),
            ),
        ),
        Technique(
            "Tensor Core utilization",
            "Tensor cores multiply small tiles in one instruction, and reach an order of magnitude "
            "more than the arithmetic units. They are busy only if operands arrive in time, so the "
            "rest of a kernel exists to feed them.",
            "NVIDIA, CUTLASS documentation, Efficient GEMM",
            (
                Instruction("HGMMA"),
                Instruction("HMMA"),
                Effect("gemm", "8192x8192x8192", "cuda/wgmma", "cuda/tma"),
                Reached("gemm", "8192x8192x8192", "cuda/wgmma", 0.65),
                Effect("gemm", "4096x24576x1536", "cuda/wgmma", "peer/cublas"),
            ),
        ),
        Technique(
            "Warpgroup MMA",
            "On Hopper four warps start one product together, which reads its operands from shared "
            "memory and runs while they go on. mma.sync reads registers and makes the warp wait.",
            "NVIDIA, PTX ISA, wgmma.mma_async",
            (
                Instruction("HGMMA", ("gemm/cuda/wgmma", "gemm/cute/wgmma")),
                Effect("paged_attn", "prefill-1x16384-32/8x128-p64", "cuda/wgmma", "cuda/split"),
            ),
            aliases=("wgmma",),
        ),
        Technique(
            "Left operand in registers",
            "A warpgroup product may take its left operand from registers. Packed or quantized "
            "weights are then decoded on the way, without a second trip through shared memory.",
            "NVIDIA, PTX ISA, wgmma.mma_async; Frantar et al., MARLIN (2024)",
            (
                Instruction("HGMMA", ("nvfp4_matmul/cuda/wgmma",)),
                Effect("nvfp4_matmul", "32x7168x18432-tiles", "cuda/wgmma", "cuda/mma"),
            ),
            modules=("kernels/cuda/include/kernelcat/wgmma_rs.cuh",),
        ),
        Technique(
            "TF32 (TensorFloat-32)",
            "A format of 19 bits lets tensor cores multiply float32 arrays with 10 bits of "
            "mantissa.",
            "NVIDIA, A100 Tensor Core GPU Architecture (white paper, 2020)",
            not_yet="products take 16, 8 and 4 bits; float32 appears only in sums.",
        ),
        Technique(
            "cuDNN benchmark mode",
            "cuDNN can time its convolution algorithms at the first call and keep the fastest.",
            "PyTorch documentation, torch.backends.cudnn",
            does_not_apply="the catalog has no convolutions and does not call cuDNN; its own tuner "
            "does this for every entry, and keeps results between programs.",
        ),
        Technique(
            "Warp votes and reductions",
            "A vote tells all lanes what a condition was in each of them, and redux gives the "
            "maximum of integers in one instruction. Both replace a loop of shuffles: a search "
            "over sorted offsets takes one vote, a block's largest absolute value one redux.",
            "NVIDIA, CUDA C++ Programming Guide, Warp Vote and Reduce Functions",
            (
                Instruction("VOTE"),
                Instruction("*REDUX"),
            ),
        ),
        Technique(
            "Population counts over bit masks",
            "A token's rank among those of its expert is the number of set bits below it in a "
            "mask. One warp ranks 32 tokens with a few instructions, where a prefix sum takes five "
            "rounds.",
            "Billeter, Olsson and Assarsson, Efficient Stream Compaction (HPG, 2009)",
            (
                Instruction("POPC"),
                Effect("moe_route", "8192-256-top8", "cuda/bitmask", "peer/tokenspeed"),
            ),
        ),
        Technique(
            "Multi-GPU programming",
            "One program drives several GPUs, which exchange data directly.",
            "NVIDIA, CUDA C++ Programming Guide, Multi-Device System",
            not_yet="kernels and models use one GPU. The tuner and the checker spread independent "
            "problems over all GPUs of a machine, which exchanges nothing.",
        ),
        Technique(
            "Host simulation of device code",
            "CUDA and CuTe kernels run on the CPU with their own source, thread by thread, against "
            "the oracle. It is slow, but it finds indexing errors before a GPU is at hand, and it "
            "proves that planted faults are found.",
            "Own work, after GPU simulators such as Barra and Ocelot",
            (
                Test("tests/test_cuda_fibers.py::test_a_planted_fault_is_found"),
                Test("tests/test_cute_experts.py::test_a_kernels_own_source_is_right_on_the_host"),
            ),
            modules=("tests/cuda_fibers.py", "tests/cute_threads.py"),
        ),
    ),
)
