"""What Blackwell adds. Kernels compile for it; none has run."""

from kernelcat.report.techniques.code import Instruction
from kernelcat.report.techniques.technique import Group, Technique

_NOT_RUN = "nothing has run on a Blackwell GPU."

GROUP = Group(
    "Blackwell",
    (
        Technique(
            "tcgen05 products",
            "One thread starts a product of a whole block, operands come from shared memory, sums "
            "go to tensor memory.",
            "NVIDIA, PTX ISA, tcgen05.mma",
            (Instruction("UTCHMMA"), Instruction("UTCQMMA")),
            not_yet=_NOT_RUN,
        ),
        Technique(
            "2-CTA tcgen05",
            "Two blocks of a cluster multiply one tile together, and each holds half of an "
            "operand.",
            "NVIDIA, PTX ISA, tcgen05 .cta_group::2",
            (Instruction("UTCHMMA*2CTA", ("gemm/cute/tcgen05",)),),
            not_yet=_NOT_RUN,
        ),
        Technique(
            "Block-scaled tensor cores",
            "Scales of blocks are copied to tensor memory, and the product applies them; no second "
            "level of sums is needed.",
            "NVIDIA, PTX ISA, tcgen05.mma .block_scale",
            (Instruction("UTCCP"), Instruction("*OMMA")),
            not_yet=_NOT_RUN,
        ),
        Technique(
            "FP4 Tensor Cores (NVFP4)",
            "Both operands have four bits, at twice the rate of FP8.",
            "NVIDIA, Blackwell Architecture Technical Brief (2024)",
            (
                Instruction(
                    "UTCOMMA",
                    ("nvfp4_matmul/cute/block_scaled",),
                ),
            ),
            not_yet=_NOT_RUN,
            aliases=("W4A4",),
        ),
        Technique(
            "HBM3e (8 TB/s)",
            "The memory of a B200 delivers 8 TB/s, two thirds more than that of an H200.",
            "NVIDIA, DGX B200 datasheet",
            not_yet="rooflines know the bandwidth; " + _NOT_RUN,
        ),
        Technique(
            "NVLink-C2C (900 GB/s)",
            "A coherent link joins Grace and Blackwell.",
            "NVIDIA, GB200 NVL72 datasheet",
            not_yet="nothing uses the memory of the CPU.",
        ),
        Technique(
            "180 GB HBM per GPU",
            "Larger models and caches fit on one GPU.",
            "NVIDIA, DGX B200 datasheet",
            not_yet="the engine takes what memory is left, whatever the GPU; " + _NOT_RUN,
        ),
    ),
)
