"""Tiling and shared memory: loading once, using often."""

from kernelcat.report.techniques.code import Instruction, Launch
from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.measured import Effect, Kept
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "Tiling and shared memory",
    (
        Technique(
            "Tiling for data reuse",
            "A tile of the result needs a strip of each operand once. The larger the tile, the "
            "fewer bytes a multiplication costs, until registers or shared memory run out.",
            "Wolf and Lam, A Data Locality Optimizing Algorithm (PLDI, 1991)",
            (
                Effect("gemm", "4096x4096x4096", "cute/tiled", "cute/naive", state="ladder"),
                Effect("gemm", "4096x24576x1536", "triton/tiled", "triton/naive"),
            ),
        ),
        Technique(
            "Shared memory allocation",
            "More than 48 KB of shared memory must be asked for at load time, and what a block "
            "takes decides how many blocks fit. Programs state the bytes of each step, and the "
            "launcher raises the limit.",
            "NVIDIA, CUDA C++ Programming Guide, Dynamic Shared Memory",
            (
                Launch("flashmla/cuda/wgmma", "64x1-128-4096", "shared memory"),
                Test(
                    "tests/test_launcher.py::"
                    "test_more_than_48_kb_of_shared_memory_is_allowed_at_load"
                ),
            ),
        ),
        Technique(
            "Bank conflict avoidance",
            "Shared memory has 32 banks of four bytes; lanes that want different words of one bank "
            "wait for each other. Columns of a row-major tile are the usual trap. Layouts are "
            "permuted so that eight rows of a matrix fragment lie in different banks.",
            "NVIDIA, CUDA C++ Best Practices Guide, Shared Memory and Memory Banks",
            (
                Launch("gemm/cuda/tma", "4096x4096x4096", "swizzle"),
                Instruction("LDSM", ("gemm/cuda/tiled", "gemm/cute/tiled")),
            ),
            aliases=("Bank conflicts",),
        ),
        Technique(
            "Swizzled shared memory (128-byte)",
            "The copy engine can exclusive-or the address bits of each 16-byte unit with its row, "
            "and warpgroup products read this layout directly. It removes bank conflicts without "
            "padding.",
            "NVIDIA, CUTLASS documentation, CuTe swizzles; CUDA driver API, CUtensorMapSwizzle",
            (
                Launch("gemm/cuda/wgmma", "4096x4096x4096", "swizzle"),
                Launch("paged_attn/cuda/wgmma", "prefill-1x16384-32/8x128-p64", "swizzle"),
                Launch("fp8_gemm/triton/gluon", "8192x8192x8192", "swizzle"),
            ),
        ),
        Technique(
            "ldmatrix and stmatrix",
            "One instruction moves four 8x8 matrices between shared memory and the registers of a "
            "warp, in the layout that tensor cores take or leave. stmatrix replaces a dozen small "
            "stores in an epilogue.",
            "NVIDIA, PTX ISA, ldmatrix and stmatrix",
            (Instruction("LDSM"), Instruction("STSM")),
            aliases=("stmatrix", "ldmatrix"),
        ),
        Technique(
            "Warp shuffle (__shfl_sync)",
            "Lanes of a warp read each other's registers. Sums and maxima of a row need five steps "
            "and no memory.",
            "NVIDIA, CUDA C++ Programming Guide, Warp Shuffle Functions",
            (Instruction("SHFL"),),
            modules=("kernels/cuda/include/kernelcat/warp_sum.cuh",),
        ),
        Technique(
            "Cooperative tiling",
            "All threads of a block load a part of the tile that all of them read. With "
            "asynchronous copies no thread holds the data in between.",
            "Kirk and Hwu, Programming Massively Parallel Processors, Tiled Matrix Multiplication",
            (
                Instruction("LDGSTS", ("gemm/cuda/tiled", "gemm/cute/tiled")),
                Effect("gemm", "4096x4096x4096", "cuda/tiled", "cuda/naive", state="ladder"),
            ),
        ),
        Technique(
            "Tile widths that are no powers of two",
            "A last wave of few tiles leaves most SMs idle. Widths such as 160, 192 or 208 columns "
            "fit the number of tiles to the number of SMs; Triton's tiles are powers of two and "
            "cannot.",
            "QuACK (Dao-AILab, 2025), tile shapes of its matrix product",
            (
                Kept("gemm/cute/wgmma", "block_n", (96, 112, 144, 160, 176, 192, 208, 224, 240)),
                Kept(
                    "gemm/cuda/wgmma",
                    "tile",
                    ("128x96", "128x160", "128x192", "128x224", "256x160", "256x192"),
                ),
            ),
        ),
    ),
)
