"""torch.compile and Triton: what compilers do, and how the catalog lives with them."""

from kernelcat.report.techniques.code import Instruction
from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.measured import Effect, Kept
from kernelcat.report.techniques.technique import Group, Technique

_TORCH = ("kernelcat/call/torch_operators.py",)

GROUP = Group(
    "torch.compile and Triton",
    (
        Technique(
            "TorchDynamo",
            "Dynamo follows Python bytecode and records tensor operations as a graph. An entry is "
            "a custom operator with a schema, so it becomes one node.",
            "Ansel et al., PyTorch 2 (ASPLOS, 2024)",
            (
                Test("tests/test_torch_ops.py::test_a_compiled_graph_keeps_the_operator"),
                Test("tests/test_torch_ops.py::test_the_operators_pass_torchs_opcheck"),
            ),
            modules=_TORCH,
        ),
        Technique(
            "FX Graph",
            "A list of nodes that tools read and rewrite. Pinned variants and choices are "
            "arguments of the node, so a graph says what runs.",
            "Reed et al., torch.fx (MLSys, 2022)",
            (
                Test("tests/test_torch_ops.py::test_the_pin_of_get_is_an_argument_in_the_graph"),
                Test("tests/test_torch_ops.py::test_a_compiled_graph_keeps_the_operator"),
            ),
            modules=_TORCH,
        ),
        Technique(
            "AOT Autograd",
            "Graphs are made functional before they are compiled: an output that is written in "
            "place becomes a result. Operators declare what they mutate.",
            "PyTorch documentation, AOTAutograd",
            (
                Test("tests/test_torch_ops.py::test_aot_autograd_keeps_it_and_functionalizes_out"),
                Test("tests/test_updated.py::test_the_schema_marks_mutated_arguments"),
            ),
            modules=_TORCH,
        ),
        Technique(
            "TorchInductor",
            "Inductor turns graphs into fused Triton kernels. Its kernels for an entry's "
            "definition are peers in races, and its graphs call the catalog's kernels.",
            "Ansel et al., PyTorch 2 (ASPLOS, 2024)",
            (
                Effect("rms_norm", "qwen3-30b-64", "cuda/registers", "peer/torch.compile"),
                Effect("fp8_swiglu", "4096x4096", "cute/fused", "peer/torch"),
                Test("tests/test_torch_ops.py::test_gpu_compile_keeps_the_operator"),
            ),
        ),
        Technique(
            "Kernel fusion",
            "Operations that read what another just wrote are put into one kernel. By hand it goes "
            "further than compilers dare: a row's norm, its residual and its quantization.",
            "Filipovic et al., Optimizing CUDA Code by Kernel Fusion (2015)",
            (
                Effect("fp8_swiglu", "4096x36864", "", "peer/torch"),
                Effect("rms_norm", "16384x4096", "cuda/registers", "peer/torch"),
                Effect("kv_write", "prefill-8192-32/8x128-fp8", "", "peer/torch"),
            ),
        ),
        Technique(
            "max-autotune mode",
            "Inductor times several kernels for each product while it compiles.",
            "PyTorch documentation, torch.compile modes",
            not_yet="peers are compiled in the default mode; the catalog's own tuner does this for "
            "its entries.",
        ),
        Technique(
            "reduce-overhead mode",
            "Compiled graphs are replayed as CUDA graphs. Entries allocate nothing while they are "
            "captured, and read nothing back.",
            "PyTorch documentation, torch.compile modes",
            (Test("tests/test_torch_ops.py::test_gpu_compile_with_cuda_graphs"),),
        ),
        Technique(
            "Graph breaks",
            "What Dynamo cannot follow splits the graph. The tests compile with fullgraph, which "
            "makes a break an error.",
            "PyTorch documentation, Working with Graph Breaks",
            (
                Test("tests/test_torch_ops.py::test_a_compiled_graph_keeps_the_operator"),
                Test("tests/test_moe_route.py::test_a_compiled_graph_gets_all_outputs_but_load"),
            ),
        ),
        Technique(
            "Regional compilation",
            "One layer is compiled and used for all, so compiling takes the time of one.",
            "PyTorch tutorials, Regional Compilation",
            not_yet="models are not compiled: they call entries, and a step is a CUDA graph.",
        ),
        Technique(
            "Dynamic shapes",
            "One compiled kernel serves many sizes. Sizes are parameters of kernels, except where "
            "a constant pays, and stay symbols in exported graphs.",
            "PyTorch documentation, Dynamic Shapes",
            (
                Test("tests/test_torch_ops.py::test_sizes_stay_symbolic_in_an_export"),
                Test("tests/test_triton_kernels.py::test_one_binary_serves_every_number_of_rows"),
                Test("tests/test_cute_fp8.py::test_one_variant_serves_every_shape"),
            ),
        ),
        Technique(
            "Shape guards",
            "A cached decision holds for the shapes, types and layouts that it was made for, and "
            "the check of each call must be cheap. The fast path uses Dynamo's tensor guards, "
            "after testing that they do refuse.",
            "PyTorch documentation, Guards Overview",
            (
                Test("tests/test_arrays.py::test_the_matcher_accepts_equal_signatures_only"),
                Test("tests/test_arrays.py::test_a_guard_that_fails_its_self_test_is_not_used"),
                Test("tests/test_dispatch.py::test_each_problem_loads_one_launcher"),
            ),
            modules=("kernelcat/call/torch_guards.py", "kernelcat/call/fast_path.py"),
        ),
        Technique(
            "Triton kernels",
            "Programs over blocks, in Python; the compiler lays out threads and pipelines loops. "
            "Every entry has Triton kernels beside those in CUDA, and some of them win.",
            "Tillet, Kung and Cox, Triton (MAPL, 2019)",
            (
                Effect("fp8_quantize", "8192x8192-1x128", "triton/tiled", "cuda/vectorized"),
                Effect("paged_attn", "decode-64x4096-64/8x64-p16", "triton/tiled", "cuda/split"),
                Test("tests/test_interpreter.py::test_triton_kernels_are_right_on_random_problems"),
            ),
        ),
        Technique(
            "Triton autotuning",
            "Block sizes, warps and stages are tried. Triton's own tuner runs in the first call; "
            "here the tuner runs ahead, checks results before it times them, and ships rows.",
            "Triton documentation, triton.autotune",
            (
                Kept("gemm/triton/tma", "tile", ("16x64x128", "128x128x64")),
                Kept("paged_attn/triton/tiled", "block_m", (16,)),
                Test(
                    "tests/test_triton_kernels.py::"
                    "test_a_tune_tries_at_most_40_configurations_of_each_implementation"
                ),
            ),
            modules=("kernelcat/tune/search.py",),
        ),
        Technique(
            "Triton warp specialization",
            "In Gluon, Triton's lower level, warps get roles: one loads, others multiply. For FP8, "
            "where sums are promoted in registers, it beats the compiler's pipelining.",
            "Triton documentation, Gluon",
            (
                Instruction("USETMAXREG", ("gemm/triton/gluon", "fp8_gemm/triton/gluon")),
                Effect("fp8_gemm", "4096x7168x2048", "triton/gluon", "triton/tma"),
            ),
            aliases=("Gluon",),
        ),
        Technique(
            "Cache eviction policies",
            "Loads of Triton take a hint which lines are evicted first.",
            "Triton documentation, triton.language.load, eviction_policy",
            (Instruction("LDG*.EF", ("fp8_quantize/triton/tiled", "fp8_swiglu/triton/fused")),),
        ),
        Technique(
            "Ahead-of-time compilation and caching",
            "Kernels are compiled without a GPU, for any architecture, and kept on disk under a "
            "digest of source, options and compiler. A warm start loads no compiler.",
            "Own work; compare ccache",
            (
                Test(
                    "tests/test_jit_cuda.py::"
                    "test_a_warm_start_takes_under_50_ms_and_imports_no_compiler"
                ),
                Test(
                    "tests/test_jit_triton.py::"
                    "test_planning_and_looking_up_never_import_the_compiler"
                ),
                Test("tests/test_jit_cute.py::test_a_loaded_kernel_runs_without_the_dsl"),
            ),
            modules=("kernelcat/jit/cache.py",),
        ),
        Technique(
            "CuTe layouts",
            "Shapes and strides are nested tuples, and tiles, swizzles and thread maps are "
            "functions of them. Kernels in CuTe DSL are Python over such layouts.",
            "NVIDIA, CUTLASS documentation, CuTe",
            (
                Effect("gemm", "8192x5120x2880", "cute/wgmma", "peer/cublas"),
                Instruction("HGMMA", ("gemm/cute/wgmma",)),
            ),
            modules=("kernels/cute/common/mainloop.py",),
        ),
    ),
)
