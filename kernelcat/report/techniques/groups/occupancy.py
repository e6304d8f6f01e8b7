"""Occupancy and instruction-level parallelism: keeping an SM busy while it waits."""

from kernelcat.report.techniques.code import Instruction
from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.measured import Kept
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "Occupancy and ILP",
    (
        Technique(
            "Occupancy calculation",
            "Registers, shared memory and threads decide how many blocks fit on an SM. Programs "
            "compute the number before they choose a grid, configurations that do not fit are "
            "illegal with a reason, and clusters are counted by what a group of SMs can hold.",
            "NVIDIA, CUDA C++ Best Practices Guide, Calculating Occupancy",
            (
                Test(
                    "tests/test_tune_search.py::"
                    "test_code_that_does_not_fit_the_gpu_fails_with_the_reason"
                ),
                Test(
                    "tests/test_multicast.py::test_whole_clusters_cover_d_and_run_at_the_same_time"
                ),
                Kept("paged_attn/cuda/tma", "blocks_per_sm", (2, 3)),
            ),
            modules=("kernels/cuda/common/persistent.py",),
        ),
        Technique(
            "__launch_bounds__",
            "Telling the compiler how many threads a block has, and how many blocks share an SM, "
            "sets the number of registers that a thread may take. Register reallocation depends "
            "on it: ptxas drops that instruction where the bound is missing.",
            "NVIDIA, CUDA C++ Programming Guide, Launch Bounds",
            (
                Instruction("USETMAXREG", ("gemm/cuda/wgmma", "flashmla/cuda/wgmma")),
                Test(
                    "tests/test_jit_cuda.py::"
                    "test_what_ptxas_ignores_becomes_a_warning_in_the_metadata"
                ),
            ),
            modules=("kernels/cuda/gemm/wgmma.cu",),
        ),
        Technique(
            "Register pressure",
            "A thread that needs more registers than it has spills to local memory, and a spill in "
            "an inner loop costs more than most techniques gain. Defaults must not spill; corners "
            "of tuning spaces are compiled to see it.",
            "NVIDIA, CUDA C++ Best Practices Guide, Register Pressure",
            (
                Test(
                    "tests/test_compiles.py::test_implementations_compile_and_their_machine_code_"
                    "proves_their_techniques"
                ),
                Test(
                    "tests/test_cuda_kernels.py::"
                    "test_corners_of_the_space_compile_without_spills_and_prove_their_techniques"
                ),
            ),
        ),
        Technique(
            "Register reallocation (setmaxnreg)",
            "A warp that only issues copies needs few registers, a warp that holds sums needs "
            "many. On Hopper warpgroups hand registers over at run time, so that a block of 384 "
            "threads can have consumers with 240 each.",
            "NVIDIA, PTX ISA, setmaxnreg; CUTLASS, warp-specialized Hopper kernels",
            (Instruction("USETMAXREG"),),
        ),
        Technique(
            "ILP (instruction-level parallelism)",
            "Independent loads of one thread overlap just as those of several threads do. "
            "Unrolling puts several vectors of a thread in flight, and the best number falls as "
            "rows grow.",
            "Volkov, Better Performance at Lower Occupancy (GTC, 2010)",
            (
                Kept("attn_merge/cuda/vectorized", "unroll", (2, 4, 8)),
                Kept("fp8_quantize/cuda/vectorized", "unroll", (2, 4, 8)),
                Kept("tma_copy/cuda/vectorized", "unroll", (2, 4)),
            ),
            aliases=("Loop unrolling",),
        ),
        Technique(
            "Latency hiding via occupancy",
            "While one block waits for memory, another one on the same SM computes. Split "
            "attention tries one to four programs an SM.",
            "Volkov, Understanding Latency Hiding on GPUs (thesis, 2016)",
            (
                Kept("paged_attn/triton/split", "per_sm", (2, 3)),
                Kept("paged_attn/cuda/split", "blocks_per_sm", (2, 3, 4)),
            ),
        ),
        Technique(
            "One block an SM with deep rings",
            "The opposite of high occupancy: a single block takes all shared memory and keeps as "
            "many tiles in flight as fit. With few rows this hides more latency than a second "
            "block.",
            "Own work, after Volkov (2010)",
            (
                Test(
                    "tests/test_cuda_kernels.py::"
                    "test_a_single_resident_thread_block_takes_all_shared_memory"
                ),
                Kept("gemm/cute/skinny", "ctas_per_sm", (1,)),
            ),
        ),
        Technique(
            "Warp divergence",
            "Lanes that take different branches run one after the other. Roles are given to whole "
            "warps, and searches use votes in place of per-lane loops. A barrier inside a branch "
            "that the compiler may split is a defect; how warps reach their role is read from the "
            "machine code.",
            "NVIDIA, CUDA C++ Best Practices Guide, Branching and Divergence",
            (
                Instruction("VOTE", ("kv_write/cuda/vectorized", "mla_kv_write/cuda/vectorized")),
                Test(
                    "tests/test_warp_dispatch.py::"
                    "test_a_read_is_ordered_only_with_a_barrier_on_every_path"
                ),
            ),
            modules=("kernelcat/verify/warp_roles.py",),
        ),
        Technique(
            "Exponentials by one instruction",
            "The special function unit computes powers of two. Softmax folds the factor log2(e) "
            "into its scale, so that an exponential is one instruction and no library call.",
            "Shah et al., FlashAttention-3 (2024); NVIDIA, PTX ISA, ex2.approx",
            (Instruction("MUFU.EX2"),),
        ),
    ),
)
