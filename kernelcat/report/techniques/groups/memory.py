"""Memory hierarchy: how bytes come from device memory to a thread."""

from kernelcat.report.techniques.code import Instruction, Launch
from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.measured import SLOWER, Counted, Effect, Kept, Reached
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "Memory hierarchy",
    (
        Technique(
            "Global memory coalescing",
            "A warp that reads neighbouring addresses costs one request a line; scattered lanes "
            "cost one each. A kernel comes near the bandwidth of memory only if nearly all of its "
            "accesses are of the first kind, so the share of the roof proves it.",
            "NVIDIA, CUDA C++ Best Practices Guide, Coalesced Access to Global Memory",
            (
                Reached("tma_copy", "8GB", "cute/vectorized", 0.8),
                Reached("tma_copy", "tile-64MB", "triton/vectorized", 0.7),
                Reached("fp8_quantize", "8192x8192-1x128", "triton/tiled", 0.7),
            ),
        ),
        Technique(
            "Vectorized loads (float4, 128-bit)",
            "A load of 16 bytes moves eight 16-bit elements with one instruction, so fewer "
            "requests are in flight for the same bytes. It needs alignment to 16 bytes, which "
            "calls check and which offset views get by one copy.",
            "NVIDIA developer blog, Luitjens, Increase Performance with Vectorized Memory Access",
            (
                Instruction("LDG*128"),
                Instruction("STG*128"),
                Effect("embedding", "64x129280x7168", "cuda/vectorized", "cuda/naive"),
                Effect("kv_write", "prefill-8192-32/8x128-fp8", "cuda/vectorized", "cuda/naive"),
            ),
        ),
        Technique(
            "L1 and L2 cache behavior",
            "L2 is shared by all SMs, so blocks that run together should want the same lines. "
            "Products walk over tiles in groups of rows, and the profiler counts what the SMs "
            "asked of L2 and what came from memory.",
            "Jia et al., Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking (2018)",
            (
                Kept("multicast_gemm/cuda/unicast", "group_m", (8,)),
                Counted(
                    "multicast_gemm",
                    "4096x4096x4096",
                    "cuda/multicast",
                    "cuda/dsmem",
                    "l2_bytes",
                ),
            ),
            aliases=("Grouped tile order", "Threadblock swizzle"),
        ),
        Technique(
            "L2 promotion and eviction hints",
            "A tensor map says how many bytes a miss brings into L2; a load may ask that its line "
            "be evicted first. Data that is read once should not push out what others read again.",
            "NVIDIA, PTX ISA, cache operators; CUDA driver API, CUtensorMapL2promotion",
            (
                Launch("gemm/cuda/wgmma", "4096x4096x4096", "L2 promotion"),
                Kept("tma_copy/cuda/tensor_map", "evict_first", (True,)),
                Instruction("LDG*.EF", ("attn_merge/cuda/vectorized", "lm_head/cuda/mma")),
            ),
            modules=("kernels/cuda/include/kernelcat/cache_policy.cuh",),
        ),
        Technique(
            "L2 persistence hints",
            "A part of L2 can be set aside for an address window, which then survives other "
            "traffic.",
            "NVIDIA, CUDA C++ Programming Guide, Device Memory L2 Access Management",
            not_yet="no launch sets an access policy window; single loads carry eviction hints.",
            aliases=("Access policy window",),
        ),
        Technique(
            "Prefetch into L2",
            "A prefetch asks for a line without waiting for it. Before a dependent launch is "
            "waited for, a kernel may already fetch what the kernel before does not write: block "
            "tables, weights.",
            "NVIDIA, PTX ISA, prefetch and cp.async.bulk.prefetch",
            (Instruction("CCTL.E.PF2", ("flashmla/cuda/wgmma", "lm_head/cuda/mma")),),
            modules=("kernels/cuda/include/kernelcat/prefetch.cuh",),
        ),
        Technique(
            "Wide L2 requests",
            "An asynchronous copy may ask L2 to fetch a whole line of 128 bytes although a thread "
            "takes 16, since its neighbours take the rest.",
            "NVIDIA, PTX ISA, cp.async level::prefetch_size",
            (Instruction("LDGSTS*LTC128B", ("gemm/cute/tiled", "paged_attn/cute/split")),),
        ),
        Technique(
            "Streaming loads and stores",
            "Data that nobody reads soon may leave the cache at once. For a copy it is a tuning "
            "parameter, and the tuner keeps it in some problems only.",
            "NVIDIA, PTX ISA, ld.global.cs and st.global.cs",
            (Kept("tma_copy/cuda/vectorized", "streaming", (True,)),),
        ),
        Technique(
            "Read-only cache (__ldg)",
            "Data that no thread writes during a kernel may be read through the non-coherent path, "
            "which also tells the compiler that loads can move.",
            "NVIDIA, CUDA C++ Programming Guide, Read-Only Data Cache Load Function",
            (
                Instruction(
                    "LDG*CONSTANT",
                    (
                        "embedding/cuda/vectorized",
                        "kv_write/cuda/vectorized",
                        "flashmla/cuda/wgmma",
                        "nvfp4_matmul/cuda/mma",
                    ),
                ),
            ),
        ),
        Technique(
            "Shared memory basics",
            "Shared memory is on the SM, is managed by the program, and is the place where a tile "
            "is kept while many threads read it.",
            "NVIDIA, CUDA C++ Programming Guide, Shared Memory",
            (
                Launch("gemm/cuda/wgmma", "4096x4096x4096", "shared memory"),
                Launch("sample/cuda/cluster", "greedy-64x201088", "shared memory"),
            ),
        ),
        Technique(
            "Rows kept in registers",
            "A normalization or a scale needs its row twice: for a sum or a maximum, and for the "
            "result. A row that stays in the registers of a block is read once from memory.",
            "Own work, after the Triton tutorial Fused Softmax",
            (
                Effect("fp8_quantize", "8192x8192-1x128", "cuda/vectorized", "cuda/naive"),
                Reached("rms_norm", "deepseek-v3-16384", "cuda/registers", 0.8),
            ),
        ),
        Technique(
            "Bulk copies against vector copies",
            "A copy engine moves kilobytes with one instruction of one thread and leaves registers "
            "free. For a plain copy of large arrays that buys nothing: 16-byte loads and stores of "
            "many blocks are faster.",
            "NVIDIA, PTX ISA, cp.async.bulk",
            (
                Instruction("UBLKCP"),
                Effect("tma_copy", "8GB", "cuda/bulk", "cuda/vectorized", SLOWER),
                Effect("tma_copy", "8GB", "cuda/tensor_map", "cuda/bulk", SLOWER),
            ),
        ),
        Technique(
            "Speculative loads",
            "A load may start before it is known whether its value is needed: more bytes, but one "
            "wait less. Parts of attention are loaded before their log-sum-exp tells whether they "
            "have keys.",
            "Own work",
            (Kept("attn_merge/cuda/vectorized", "eager", (True,)),),
        ),
        Technique(
            "Unified Memory",
            "Pages move between CPU and GPU when they are touched, so that a program needs no "
            "copies.",
            "NVIDIA, CUDA C++ Programming Guide, Unified Memory",
            does_not_apply="callers own their arrays and say where these lie; a page fault in a "
            "kernel would cost more than any kernel here takes.",
        ),
        Technique(
            "TMA's units of 16 bytes",
            "The copy engine clips boxes at a tensor's edge in units of 16 bytes, so rows of other "
            "lengths must be refused or finished by threads. Poison around outputs shows what is "
            "written too far.",
            "NVIDIA, CUDA driver API, cuTensorMapEncodeTiled",
            (
                Test("tests/test_triton_kernels.py::test_tma_is_illegal_with_a_reason"),
                Test("tests/test_cute_fp8.py::test_tma_refuses_rows_that_are_not_whole_units"),
                Test("tests/test_launcher.py::test_an_invalid_descriptor_is_refused_at_load"),
            ),
            modules=("kernelcat/runtime/tensor_map.py",),
        ),
    ),
)
