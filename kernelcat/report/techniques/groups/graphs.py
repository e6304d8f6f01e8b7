"""Dynamic scheduling and CUDA graphs: who decides what runs next, and what a launch costs."""

from kernelcat.report.techniques.code import Instruction, Launch
from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.measured import Effect, Kept
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "Dynamic scheduling and CUDA graphs",
    (
        Technique(
            "Atomic work queues",
            "Blocks take the number of their next tile from a counter, so that fast blocks do "
            "more.",
            "Aila and Laine, Understanding the Efficiency of Ray Traversal on GPUs (HPG, 2009)",
            not_yet="tiles are dealt out in a fixed order, or by a plan that each block computes "
            "from the lengths; atomics count arrivals only.",
        ),
        Technique(
            "Schedules made on the device",
            "Each block computes its share of all tiles from the lengths in memory. The host need "
            "not know the lengths, so one captured graph serves all of them, and uneven sequences "
            "share the chip evenly.",
            "Ye et al., FlashInfer (2025); Merrill and Garland, Merge-Based SpMV (SC, 2016)",
            (
                Effect(
                    "paged_attn", "ragged-64x16384-32/8x128-p16", "triton/split", "triton/tiled"
                ),
                Effect(
                    "paged_attn", "decode-16x32768-32/8x128-p16", "triton/split", "triton/tiled"
                ),
                Test("tests/test_triton_flashmla.py::test_a_replayed_launch_follows_the_lengths"),
            ),
            modules=("kernels/cuda/paged_attn/work_list.cuh",),
        ),
        Technique(
            "Batched atomics",
            "Threads combine their updates first, and one of them makes the atomic. Routing sets "
            "a bit for each token in a mask of its expert, so that one atomic serves a word of "
            "tokens and ranks come from population counts.",
            "NVIDIA developer blog, Adinetz, Warp-Aggregated Atomics",
            (
                Instruction("ATOMS.OR", ("moe_route/cuda/bitmask", "moe_route/cute/bitmask")),
                Effect("moe_route", "qwen3-30b-64", "cuda/bitmask", "peer/torch"),
            ),
        ),
        Technique(
            "CUDA graph capture",
            "Launches are recorded once and become one object. Entries can be captured from their "
            "first call on, because workspaces belong to the launcher and nothing is read back to "
            "the host.",
            "NVIDIA, CUDA C++ Programming Guide, CUDA Graphs",
            (
                Test("tests/test_bench.py::test_a_capture_that_fails_is_ended"),
                Test(
                    "tests/test_launcher_gpu.py::"
                    "test_a_first_call_inside_a_capture_allocates_and_replays"
                ),
            ),
            modules=("kernelcat/bench/timer.py", "kernelcat/moe/engine/runner.py"),
        ),
        Technique(
            "Graph replay",
            "A replayed graph launches its kernels back to back. The same kernel takes several "
            "times as long where each call is launched by the host and the array is small.",
            "NVIDIA developer blog, Gray, Getting Started with CUDA Graphs",
            (
                Effect(
                    "attn_merge",
                    "2x128-32x128",
                    "cuda/vectorized",
                    "cuda/vectorized",
                    other_regime="eager",
                ),
                Effect(
                    "attn_merge",
                    "2x64-64x64",
                    "cuda/vectorized",
                    "cuda/vectorized",
                    other_regime="eager",
                ),
                Test(
                    "tests/test_moe_engine_gpu.py::"
                    "test_a_replay_computes_what_a_run_without_a_graph_computes"
                ),
            ),
        ),
        Technique(
            "Graph constraints",
            "A graph repeats addresses and grids. Whoever captures must keep arrays and workspaces "
            "alive, and kernels must read lengths from memory. Both rules were learned from "
            "crashes, and tests hold them.",
            "PyTorch documentation, CUDA semantics, Constraints of CUDA Graphs",
            (
                Test(
                    "tests/test_bench.py::"
                    "test_a_graph_keeps_the_arrays_of_its_runs_and_the_memory_of_its_capture"
                ),
                Test("tests/test_moe_route.py::test_a_graph_is_right_on_other_logits"),
                Test(
                    "tests/test_paged_attn_gpu.py::"
                    "test_a_captured_graph_follows_changed_lengths_and_tables"
                ),
            ),
        ),
        Technique(
            "Graph bucketing",
            "A graph has one size, so steps are padded to one of a few sizes, each captured and "
            "compiled before the first request.",
            "vLLM documentation, CUDA graphs",
            (
                Test(
                    "tests/test_moe_step_arrays.py::"
                    "test_every_step_has_a_size_that_is_compiled_before"
                ),
                Test(
                    "tests/test_moe_engine_gpu.py::"
                    "test_ten_thousand_steps_compile_nothing_and_keep_memory_flat"
                ),
            ),
            modules=("kernelcat/moe/engine/step_sizes.py",),
        ),
        Technique(
            "Graph piecewise capture and conditional nodes",
            "Parts of a step that depend on the request stay outside of the graph. The engine "
            "captures the model up to its hidden states; head, filters and masks are launched "
            "behind it.",
            "vLLM, piecewise CUDA graphs; NVIDIA, Conditional Graph Nodes",
            (
                Test(
                    "tests/test_moe_models_gpu.py::"
                    "test_a_captured_step_serves_other_tokens_lengths_and_pages"
                ),
                Test(
                    "tests/test_moe_engine_gpu.py::test_a_layer_of_gpt_oss_is_few_nodes_of_a_graph"
                ),
            ),
            modules=("kernelcat/moe/engine/runner.py",),
            not_yet="no conditional nodes: a graph has no branches.",
        ),
        Technique(
            "Device-initiated graph launch",
            "A kernel starts a graph, and the host is not asked.",
            "NVIDIA, CUDA C++ Programming Guide, Device Graph Launch",
            not_yet="the host launches every step; it is ahead of the device by one step.",
        ),
        Technique(
            "PDL (Programmatic Dependent Launch)",
            "The next kernel starts while this one ends: it sets up barriers, fetches weights and "
            "tables that the kernel before does not write, then waits. Short kernels gain most.",
            "NVIDIA, CUDA C++ Programming Guide, Programmatic Dependent Launch",
            (
                Instruction("ACQBULK"),
                Instruction("PREEXIT", ("gemm/cuda/wgmma", "sample/cuda/cluster")),
                Launch("rms_norm/cuda/registers", "qwen3-30b-1", "dependent launch"),
                Test("tests/test_launcher_gpu.py::test_dependent_launches_keep_their_order"),
            ),
            modules=("kernels/cuda/include/kernelcat/pdl.cuh",),
        ),
        Technique(
            "Dynamic parallelism",
            "A kernel launches other kernels, with grids that it computes.",
            "NVIDIA, CUDA C++ Programming Guide, CUDA Dynamic Parallelism",
            does_not_apply="grids are launched for the most work that the shapes allow, and blocks "
            "without work end at once; that costs less than a launch from the device.",
        ),
        Technique(
            "Stream-ordered allocation",
            "Memory is taken and given back in the order of a stream, without a stop of the "
            "device.",
            "NVIDIA, CUDA C++ Programming Guide, Stream Ordered Memory Allocator",
            does_not_apply="outputs come from the caller's library, whose allocator is ordered by "
            "streams, and workspaces are allocated once for each launcher and stream.",
        ),
        Technique(
            "Tail effects mitigation",
            "The last wave of tiles may fill a few SMs only. Tile widths are chosen for whole "
            "waves, operands change sides where that saves a wave, and the tiles of a short last "
            "wave may be split along K.",
            "Osama et al., Stream-K (PPoPP, 2023)",
            (
                Kept("gemm/triton/gluon", "tail_splits", (2, 4)),
                Test("tests/test_cuda_kernels.py::test_the_tiles_of_a_short_last_wave_are_split"),
                Test(
                    "tests/test_cuda_kernels.py::test_large_tiles_are_swapped_only_for_fewer_waves"
                ),
            ),
            aliases=("Tail effects", "Wave quantization"),
        ),
    ),
)
