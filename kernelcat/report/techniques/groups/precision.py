"""Precision, formats, and the tuning of a PyTorch system."""

from kernelcat.report.techniques.code import Instruction, Launch
from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.measured import Effect, Kept
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "PyTorch system tuning and precision",
    (
        Technique(
            "PyTorch Profiler",
            "torch.profiler lists operators and kernels of a program with their times.",
            "PyTorch documentation, torch.profiler",
            not_yet="`kernelcat profile` uses Nsight Compute; nothing reads torch's profiler.",
        ),
        Technique(
            "FP8 E4M3/E5M2 formats",
            "Eight bits with four or five bits of exponent halve the bytes of 16-bit operands and "
            "double the rate of tensor cores. Conversions saturate and equal torch's bit by bit.",
            "Micikevicius et al., FP8 Formats for Deep Learning (2022)",
            (
                Instruction("QGMMA"),
                Instruction("F2FP*E4M3"),
                Effect("fp8_gemm", "64x7168x16384", "cuda/wgmma", "peer/torch"),
                Effect("fp8_quantize", "4096x7168-1x128", "triton/tiled", "peer/torch"),
                Test("tests/test_check.py::test_float8_conversions_equal_those_of_torch"),
            ),
            not_yet="E5M2, which is for gradients.",
            aliases=("FP8",),
        ),
        Technique(
            "Block scales",
            "One scale for a tensor is decided by its largest outlier. A scale for each 128 values "
            "of activations, and each 128x128 of weights, keeps outliers local.",
            "DeepSeek-AI, DeepSeek-V3 Technical Report (2024), section 3.3",
            (
                Test(
                    "tests/test_reference.py::"
                    "test_the_scale_of_another_block_makes_errors_beyond_the_tolerance"
                ),
            ),
        ),
        Technique(
            "Two-level FP8 accumulation",
            "Hopper's tensor cores add FP8 products with few bits. Sums over 128 columns are "
            "therefore multiplied by their scales and added in float32 registers, while the next "
            "product runs.",
            "DeepSeek-AI, DeepSeek-V3 Technical Report (2024), section 3.3.2; DeepGEMM",
            (
                Kept("fp8_gemm/cuda/wgmma", "overlap", ("ahead", "free")),
                Effect("fp8_gemm", "4096x4096x7168", "triton/gluon", "triton/tma"),
                Test(
                    "tests/test_cute_fp8.py::"
                    "test_large_tiles_multicast_and_promote_with_one_multiply_add_an_element"
                ),
            ),
            aliases=("Promotion",),
        ),
        Technique(
            "Transformer Engine",
            "NVIDIA's library of FP8 layers for training and inference.",
            "NVIDIA, Transformer Engine documentation",
            does_not_apply="it is a library of layers beside this one; its recipes for training "
            "have no place in a catalog of forward kernels.",
        ),
        Technique(
            "DelayedScaling recipe",
            "The scale of a tensor comes from the largest values of earlier steps, so that "
            "quantization needs one pass.",
            "NVIDIA, Transformer Engine documentation, recipes",
            does_not_apply="scales are those of the values themselves, found in the same pass; a "
            "history of steps exists in training only.",
        ),
        Technique(
            "MXFP8 format",
            "FP8 values share a power-of-two scale by blocks of 32, and Blackwell's tensor cores "
            "multiply by the scales.",
            "Open Compute Project, Microscaling Formats (MX) Specification 1.0 (2023)",
            (Instruction("UTCQMMA", ("moe_gemm/cute/block_scaled",)),),
            not_yet="nothing has run on a Blackwell GPU, and no entry has MXFP8 arrays: 4-bit "
            "weights are widened to them on the way.",
            aliases=("MXFP8 native support",),
        ),
        Technique(
            "MXFP4 format",
            "4-bit values share a power-of-two scale by blocks of 32. Experts of gpt-oss are "
            "published so, and stay so.",
            "Open Compute Project, Microscaling Formats (MX) Specification 1.0 (2023)",
            (
                Effect("nvfp4_matmul", "1x2880x2880-mxfp4-tiles", "cuda/mma", "peer/cublas"),
                Effect("nvfp4_quantize", "8192x8192-mxfp4", "cuda/vectorized", "peer/torch"),
                Test(
                    "tests/test_fp4.py::test_mxfp4_has_the_shared_exponent_of_the_ocp_specification"
                ),
                Test("tests/test_moe_checkpoints.py::test_experts_stay_in_4_bits"),
            ),
        ),
        Technique(
            "NVFP4 format",
            "4-bit values share an FP8 scale by blocks of 16, and a float32 scale for the whole "
            "tensor. On Hopper weights are decoded in registers; what is gained is bytes.",
            "NVIDIA developer blog, Introducing NVFP4 (2025)",
            (
                Effect("nvfp4_matmul", "1x7168x18432-tiles", "cuda/mma", "peer/cublas"),
                Effect("nvfp4_dequantize", "7168x18432-nvfp4", "cuda/vectorized", "peer/torch"),
                Test(
                    "tests/test_fp4_matmul.py::test_products_keep_16_db_in_nvfp4_and_12_db_in_mxfp4"
                ),
            ),
        ),
        Technique(
            "FP8 KV cache",
            "A cache in eight bits holds twice the tokens, and decoding reads half the bytes. "
            "Scales are per cache or per page.",
            "vLLM documentation, Quantized KV Cache",
            (
                Effect(
                    "paged_attn",
                    "decode-128x4096-32/8x128-p16-e4m3",
                    "",
                    "",
                    other_problem="decode-128x4096-32/8x128-p16",
                ),
                Effect(
                    "paged_attn",
                    "decode-64x4096-64/8x64-p16-e4m3",
                    "",
                    "",
                    other_problem="decode-64x4096-64/8x64-p16",
                ),
            ),
        ),
        Technique(
            "NVFP4 KV cache",
            "A cache in four bits with block scales holds three and a half times the tokens; the "
            "bytes are saved, and instructions become the limit.",
            "NVIDIA developer blog, NVFP4 KV Cache (2025)",
            (
                Effect(
                    "paged_attn",
                    "decode-128x4096-32/8x128-p16-nvfp4",
                    "",
                    "",
                    other_problem="decode-128x4096-32/8x128-p16",
                ),
                Test(
                    "tests/test_paged_attn.py::"
                    "test_a_quantized_cache_uses_the_whole_range_of_its_codes"
                ),
            ),
        ),
        Technique(
            "Norm and quantization in one pass",
            "A normalized row is quantized while it is in registers, and is not written in 16 "
            "bits.",
            "FlashInfer and vLLM, fused RMSNorm and quantization",
            (
                Launch("rms_norm/cuda/registers", "16384x7168-nvfp4", "few launches"),
                Launch("nvfp4_quantize/cuda/vectorized", "8192x7168-nvfp4-rms", "few launches"),
                Test(
                    "tests/test_rms_norm.py::"
                    "test_the_oracle_of_nvfp4_is_that_of_nvfp4_quantize_with_its_norm"
                ),
            ),
        ),
        Technique(
            "Stochastic rounding",
            "A value is rounded up with the probability of its fraction, so that means survive. "
            "Random bits come from Philox by position, and a seed repeats them.",
            "Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC, 2011)",
            (
                Test(
                    "tests/test_fp4.py::"
                    "test_stochastic_rounding_keeps_the_mean_and_takes_neighbouring_codes"
                ),
                Test("tests/test_fp4.py::test_philox_has_the_known_answers_of_its_authors"),
            ),
        ),
        Technique(
            "Hadamard transform",
            "An orthogonal transform spreads outliers over their block before quantization, and is "
            "its own inverse.",
            "Ashkboos et al., QuaRot (2024)",
            (
                Test(
                    "tests/test_fp4.py::"
                    "test_the_hadamard_transform_is_orthogonal_and_its_own_inverse"
                ),
                Test(
                    "tests/test_fp4.py::test_the_same_signs_undo_the_transform_after_dequantization"
                ),
            ),
        ),
        Technique(
            "Signal to quantization noise",
            "A tolerance on the largest error lets a constant offset pass. Products of quantized "
            "operands must also keep a number of decibels.",
            "Own work; Jayant and Noll, Digital Coding of Waveforms (1984)",
            (
                Test(
                    "tests/test_signal.py::"
                    "test_a_constant_offset_is_within_tolerance_but_below_the_required_signal"
                ),
            ),
            modules=("kernelcat/verify/gate.py",),
            aliases=("SQNR",),
        ),
        Technique(
            "Memory pools (caching allocator)",
            "Taking memory from the driver stops the device, so freed blocks are kept and given "
            "out again. The engine takes its caches and buffers once, and a step allocates none.",
            "PyTorch documentation, CUDA memory management",
            (
                Test(
                    "tests/test_moe_step_arrays.py::"
                    "test_memory_stays_flat_over_ten_thousand_steps_of_mixed_sizes"
                ),
                Test("tests/test_moe_engine.py::test_memory_stays_flat_over_steps_of_mixed_sizes"),
                Test("tests/test_dispatch.py::test_bind_allocates_its_output_once"),
            ),
            modules=("kernelcat/moe/engine/memory.py",),
        ),
    ),
)
