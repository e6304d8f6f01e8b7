"""Matrix products: what their shapes ask for."""

from kernelcat.report.techniques.code import Instruction, Launch
from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.measured import Effect, Kept
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "Matrix products",
    (
        Technique(
            "Split-K and stream-K",
            "A product with few tiles leaves SMs idle, so K is divided among blocks and their sums "
            "are added. Sums are added in the order of the splits, which keeps results "
            "reproducible.",
            "Osama et al., Stream-K (PPoPP, 2023)",
            (
                Kept("nvfp4_matmul/cuda/wgmma", "split_k", (2, 3, 4)),
                Kept("gemm/triton/tma", "split_k", (2, 4, 8)),
                Launch("gemm/cuda/wgmma", "64x2112x7168", "workspace"),
                Test(
                    "tests/test_stream_k.py::"
                    "test_a_kernel_is_right_on_the_host_and_leaves_its_counters_at_zero"
                ),
            ),
            not_yet="stream-K on a GPU: `gemm/cuda/stream_k` is compiled, and its schedule is "
            "tested on the host.",
            aliases=("Split-K", "Stream-K", "stream-K and split-K"),
        ),
        Technique(
            "Split-K within a cluster",
            "The blocks that share a tile form a cluster, and sums meet in shared memory. No "
            "workspace and no second pass.",
            "Own work, after CUTLASS, distributed shared memory",
            (
                Kept("gemm/cute/skinny", "split_k", (2, 3, 4, 6, 8)),
                Launch("gemm/cute/skinny", "64x2880x4096", "cluster"),
                Kept("nvfp4_matmul/cuda/mma", "cluster", (2, 4, 8)),
                Test("tests/test_cluster_split.py::test_clusters_are_right_on_the_host"),
            ),
        ),
        Technique(
            "Operand swap at few rows",
            "A warpgroup product has 64 rows. With 8 rows of activations most of them would be "
            "empty, so weights take the side of 64 rows and the result is transposed.",
            "CUTLASS, mixed-input and small-M kernels; DeepGEMM (DeepSeek, 2025)",
            (
                Kept("gemm/cuda/wgmma", "swap", (True,)),
                Kept("fp8_gemm/cute/wgmma", "swap", (True,)),
            ),
        ),
        Technique(
            "Kernels for few rows",
            "A product of one to 64 rows is a matter of reading weights. A kernel for it keeps "
            "many bytes in flight and does little else.",
            "Own work, after the GEMV kernels of llama.cpp and TensorRT-LLM",
            (
                Effect("gemm", "1x2880x4096", "cute/skinny", "peer/cublas"),
                Effect("gemm", "16x7168x2048", "cute/skinny", "cute/tiled"),
                Effect("nvfp4_matmul", "1x4096x4096-tiles", "cuda/mma", "cuda/wgmma"),
            ),
        ),
        Technique(
            "Epilogue fusion",
            "Bias, activation, gating and residual are applied to sums while they are in "
            "registers. The result is written once.",
            "NVIDIA, CUTLASS, Epilogue Visitor Tree (Chen et al., ASPLOS, 2024)",
            (
                Test("tests/test_dispatch_gpu.py::test_epilogues_come_with_the_call"),
                Test("tests/test_triton_kernels.py::test_a_kernel_is_right_at_its_edges"),
                Test(
                    "tests/test_choose.py::"
                    "test_a_measurement_serves_other_epilogues_of_the_same_product"
                ),
            ),
            modules=(
                "kernels/cuda/include/kernelcat/epilogue.cuh",
                "kernels/triton/common/device/epilogue.py",
                "kernels/cute/common/epilogue.py",
            ),
        ),
        Technique(
            "Epilogue overlap",
            "Results leave through shared memory by asynchronous stores, in parts, while the next "
            "tile is loaded and multiplied.",
            "Triton tutorial, Persistent Matmul; CUTLASS, Hopper epilogues",
            (
                Kept("gemm/triton/persistent", "subtiles", (2,)),
                Effect("gemm", "4096x24576x1536", "triton/persistent", "triton/tma"),
                Instruction("UTMASTG", ("gemm/triton/persistent", "gemm/cute/wgmma")),
            ),
        ),
        Technique(
            "Prepacked 4-bit weights",
            "Weights are put once into the order in which a lane of a tensor-core instruction "
            "wants them. A load of 16 bytes then brings 32 weights that need no exchange.",
            "Frantar et al., MARLIN (2024)",
            (
                Effect("nvfp4_matmul", "1x7168x18432-tiles", "cuda/mma", "peer/cublas"),
                Effect("nvfp4_matmul", "16x14336x4096-tiles", "cuda/mma", "peer/cublas"),
                Test(
                    "tests/test_fp4_matmul.py::"
                    "test_each_word_of_packed_codes_is_the_operand_of_one_lane"
                ),
            ),
            modules=("kernelcat/layers/fp4.py",),
        ),
        Technique(
            "Few instructions to decode",
            "4-bit codes become 16-bit numbers by shifts and masks on pairs. The count of "
            "instructions decides how many rows a kernel serves before arithmetic binds it, so a "
            "test counts them.",
            "Frantar et al., MARLIN (2024); Kim et al., Who Says Elephants Can't Run (2022)",
            (Test("tests/test_nvfp4_cuda.py::test_the_number_of_instructions_that_decode_a_tile"),),
            modules=("kernels/cuda/include/kernelcat/fp4_operand.cuh",),
        ),
        Technique(
            "Head without logits",
            "The largest logits of a vocabulary are found while they are computed: each tile keeps "
            "its best few, and these are merged. Logits are never written.",
            "Own work; compare the fused linear cross entropy of Liger Kernel (2024)",
            (
                Effect("lm_head", "1x201088x2880", "triton/tiled", "peer/torch"),
                Effect("lm_head", "64x201088x2880", "triton/tiled", "peer/torch"),
            ),
        ),
        Technique(
            "Sampling without a sort",
            "top-k and top-p need to know which tokens stay, not their order. A draw is tried, and "
            "tried again among the tokens before it if it does not stay; each try is a pass over "
            "logits in shared memory, where a cluster holds a whole vocabulary.",
            "FlashInfer, Sorting-Free GPU Kernels for LLM Sampling (2025)",
            (
                Effect("sample", "filtered-1x201088", "cuda/cluster", "peer/torch"),
                Effect("sample", "filtered-64x201088", "cuda/cluster", "triton/blocked"),
                Test("tests/test_sample.py::test_filters_leave_prefixes_of_the_order"),
            ),
        ),
        Technique(
            "Batch-invariant reductions",
            "If sums are added in an order that does not depend on the batch, a request gets the "
            "same tokens alone and in company. Sampling has this property: a draw depends on seed "
            "and position alone.",
            "He et al., Defeating Nondeterminism in LLM Inference (Thinking Machines, 2025)",
            (
                Test("tests/test_sample.py::test_a_row_does_not_depend_on_its_batch"),
                Test(
                    "tests/test_moe_engine.py::"
                    "test_seeds_are_reproducible_whatever_else_is_in_the_batch"
                ),
            ),
            not_yet="products choose kernel and split by the number of rows, so logits may differ "
            "in the last bits between batches on a GPU.",
        ),
    ),
)
