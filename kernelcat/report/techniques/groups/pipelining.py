"""Pipelining within a kernel: loads, products and stores of different tiles at the same time."""

from kernelcat.report.techniques.code import Instruction, Launch
from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.measured import SLOWER, TIE, Counted, Effect, Kept
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "Intra-kernel pipelining",
    (
        Technique(
            "Double buffering",
            "While one buffer is computed on, the other is filled. Two stages suffice where a tile "
            "takes longer to compute than to load, as in attention over long keys.",
            "NVIDIA, CUTLASS documentation, Efficient GEMM, Pipelining",
            (
                Kept("paged_attn/cuda/wgmma", "stages", (2,)),
                Kept("flashmla/cute/split", "stages", (2,)),
            ),
        ),
        Technique(
            "Software pipelining",
            "A loop loads what an iteration several rounds ahead will need. The number of stages "
            "is a tuning parameter, since each stage takes shared memory.",
            "Lam, Software Pipelining (PLDI, 1988); Triton documentation, num_stages",
            (
                Kept("gemm/triton/persistent", "stages", (4, 6)),
                Kept("nvfp4_matmul/cute/tiled", "stages", (4, 6)),
                Instruction("LDGSTS", ("gemm/triton/tiled",)),
            ),
        ),
        Technique(
            "cp.async / memcpy_async",
            "An asynchronous copy of 4 to 16 bytes goes from memory to shared memory without "
            "passing through registers. It takes any address, so it gathers rows and pages that "
            "tensor maps cannot describe.",
            "NVIDIA, PTX ISA, cp.async",
            (
                Instruction("LDGSTS"),
                Effect("paged_attn", "decode-128x4096-32/8x128-p16", "cute/split", "cuda/tma"),
            ),
            aliases=("Asynchronous copy",),
        ),
        Technique(
            "CUDA Pipeline API",
            "cuda::pipeline wraps stages of asynchronous copies in a C++ object.",
            "NVIDIA, CUDA C++ Programming Guide, Pipeline interface",
            does_not_apply="rings are built on mbarriers and commit groups directly, which also "
            "carry TMA and work alike in CUDA and CuTe.",
        ),
        Technique(
            "mbarrier",
            "A barrier object in shared memory counts arrivals and bytes. A consumer waits for a "
            "phase of it, and nobody else has to wait. Rings have a full and an empty barrier for "
            "each stage.",
            "NVIDIA, PTX ISA, mbarrier",
            (Instruction("SYNCS"),),
            modules=("kernels/cuda/include/kernelcat/mbarrier.cuh",),
            aliases=("Transaction barrier",),
        ),
        Technique(
            "Warp specialization",
            "Some warps only load, others only multiply, and barriers join them. The consumers' "
            "loop has no addresses in it, and loads run ahead as far as the ring is deep.",
            "Bauer, Cook and Khailany, CudaDMA (SC, 2011); CUTLASS, Hopper kernels",
            (
                Instruction("USETMAXREG"),
                Effect("fp8_gemm", "8192x8192x8192", "triton/gluon", "triton/tma"),
            ),
        ),
        Technique(
            "Ping-pong and cooperative consumers",
            "Two consumer warpgroups either share a large tile, or take turns: one multiplies "
            "while the other stores its tile. Turns pay where K is short and the epilogue a large "
            "part.",
            "NVIDIA, CUTLASS, KernelTmaWarpSpecializedPingpong",
            (
                Kept("gemm/cuda/wgmma", "schedule", ("pingpong",)),
                Kept("gemm/cute/wgmma", "pingpong", (True,)),
                Kept("gemm/triton/gluon", "schedule", ("pingpong",)),
            ),
        ),
        Technique(
            "TMA (Tensor Memory Accelerator)",
            "One thread names a box of a tensor, and the copy engine computes addresses, bounds "
            "and swizzle. It pays in prefill; for decode over small pages it does not.",
            "NVIDIA, CUDA C++ Programming Guide, Tensor Memory Accelerator",
            (
                Instruction("UTMALDG"),
                Effect("paged_attn", "prefill-1x16384-32/8x128-p64", "triton/tma", "triton/tiled"),
                Effect(
                    "paged_attn",
                    "decode-128x2048-32/8x128-p64",
                    "triton/split_tma",
                    "triton/split",
                    TIE,
                ),
            ),
        ),
        Technique(
            "TMA multicast",
            "A load may deliver its box to several blocks of a cluster. Where rows begin at cache "
            "lines the crossbar already merges equal reads and nothing is gained; where rows "
            "straddle lines multicast wins.",
            "NVIDIA, PTX ISA, cp.async.bulk.tensor .multicast::cluster; CUTLASS",
            (
                Instruction("UTMALDG*MULTICAST"),
                Effect("multicast_gemm", "4097x5000x2056", "cuda/multicast", "cuda/unicast"),
                Effect("multicast_gemm", "8192x8192x8192", "cuda/multicast", "cuda/unicast", TIE),
                Counted(
                    "multicast_gemm",
                    "4096x4096x4096",
                    "cute/multicast",
                    "cute/unicast",
                    "l2_read_bytes",
                ),
            ),
        ),
        Technique(
            "TMA store and reduce",
            "A tile in shared memory is stored by one instruction, while the block goes on with "
            "the next tile. A reduction adds to what lies there.",
            "NVIDIA, PTX ISA, cp.async.bulk.tensor and cp.reduce.async.bulk",
            (
                Instruction("UTMASTG"),
                Effect("gemm", "4096x4096x4096", "triton/persistent", "triton/tma", state="ladder"),
            ),
            not_yet="no kernel lets the engine add: sums of splits are added by the last block.",
        ),
        Technique(
            "Descriptor prefetch",
            "The first copy through a tensor map waits for the map itself. A prefetch at the start "
            "of the kernel hides that.",
            "NVIDIA, PTX ISA, prefetch.tensormap",
            (Instruction("UTMACCTL.PF", ("gemm/cuda/wgmma", "flashmla/cuda/wgmma")),),
        ),
        Technique(
            "TMEM (Tensor Memory)",
            "On Blackwell sums live in a memory of their own beside the tensor cores, so a tile "
            "takes no registers until it is read back.",
            "NVIDIA, PTX ISA, tcgen05",
            (Instruction("LDTM"),),
            not_yet="nothing has run on a Blackwell GPU.",
        ),
        Technique(
            "Persistent kernels",
            "One block an SM walks over many tiles. Barriers and descriptors are set up once, and "
            "the loads of the next tile begin during the stores of this one.",
            "Gupta, Stuart and Owens, A Study of Persistent Threads Style (InPar, 2012)",
            (
                Launch("gemm/cuda/wgmma", "4096x4096x4096", "persistent grid"),
                Launch("paged_attn/cuda/wgmma", "prefill-1x16384-32/8x128-p64", "persistent grid"),
                Effect("gemm", "4096x24576x1536", "triton/persistent", "triton/tma"),
            ),
        ),
        Technique(
            "Online softmax",
            "A running maximum and sum let softmax be computed in one pass over the scores; "
            "earlier sums are rescaled when the maximum grows. Rescaling is skipped where no "
            "maximum of the warp changed.",
            "Milakov and Gimelshein, Online Normalizer Calculation for Softmax (2018)",
            (
                Instruction("MUFU.EX2", ("paged_attn/cuda/wgmma", "flashmla/cuda/wgmma")),
                Test("tests/test_paged_attn_cuda.py::test_registers_is_right_on_the_host"),
            ),
            modules=(
                "kernels/cuda/include/kernelcat/running_softmax.cuh",
                "kernels/cute/common/online_softmax.py",
            ),
        ),
        Technique(
            "FlashAttention internals",
            "Scores of a tile of keys never leave the SM: they become weights in registers and are "
            "multiplied by the values at once. On Hopper the scores of one tile and the values of "
            "the tile before are in flight together, with softmax in between.",
            "Dao et al., FlashAttention (2022), FlashAttention-2 (2023); Shah et al., "
            "FlashAttention-3 (2024)",
            (
                Effect("paged_attn", "prefill-1x16384-32/8x128-p64", "cuda/wgmma", "peer/sdpa"),
                Effect(
                    "paged_attn", "prefill-4x4096-32/8x128-p64", "cuda/wgmma", "peer/flashinfer"
                ),
                Effect(
                    "paged_attn",
                    "prefill-4x4096-32/8x128-p64",
                    "cuda/wgmma",
                    "peer/flash_attn_4",
                    TIE,
                ),
                Effect(
                    "paged_attn",
                    "prefill-1x16384-32/8x128-p64",
                    "cuda/wgmma",
                    "peer/flash_attn_4",
                    SLOWER,
                ),
            ),
        ),
        Technique(
            "Fences between proxies",
            "The copy engine writes through another path than the threads' loads and stores. A "
            "stage that threads have read must be fenced before it is filled again; without the "
            "fence a few of millions of elements were wrong.",
            "NVIDIA, PTX ISA, fence.proxy.async",
            (Instruction("FENCE.VIEW.ASYNC", ("gemm/cuda/tma",)),),
            modules=(
                "kernels/cuda/gemm/tma.cu",
                "kernels/cuda/include/kernelcat/stage_release.cuh",
            ),
        ),
    ),
)
