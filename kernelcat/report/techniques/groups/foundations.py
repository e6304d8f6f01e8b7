"""Foundations: the machine, its limits, and the tools that look into it."""

from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.measured import Counted, Effect
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "Foundations",
    (
        Technique(
            "GPU architecture (SM, warps, SIMT)",
            "An SM runs thousands of threads in warps of 32 and hides waiting by switching among "
            "them; it has its own registers, shared memory and tensor cores. Code that ignores "
            "this structure uses a small part of the chip. The catalog keeps SMs, memories and "
            "peak rates of every supported GPU in one table, and cost models read from it.",
            "NVIDIA, H100 Tensor Core GPU Architecture (white paper, 2022)",
            (
                Effect("gemm", "4096x4096x4096", "cuda/tma", "cuda/naive", state="ladder"),
                Test("tests/test_gpu.py::test_names_of_the_driver_are_found_in_the_table"),
            ),
            modules=("kernelcat/runtime/gpu.py",),
        ),
        Technique(
            "CUDA execution model",
            "A kernel is a grid of thread blocks; each block is placed on one SM, and only the "
            "threads of a block may wait for each other. The launcher passes grid, block, shared "
            "memory and parameters as the machine code declares them. The test of CUDA kernels "
            "without a GPU runs each thread as a fiber, with barriers and votes, so it has to "
            "follow the model.",
            "NVIDIA, CUDA C++ Programming Guide, chapter Programming Model",
            (
                Test("tests/test_cuda_fibers.py::test_a_kernel_is_right_on_the_host"),
                Test("tests/test_launcher.py::test_every_step_is_launched_in_order"),
            ),
            modules=("kernelcat/runtime/launcher.py", "tests/cuda_fibers.py"),
        ),
        Technique(
            "Roofline model",
            "The time of a kernel is at least its operations over the peak rate, and at least its "
            "bytes over the bandwidth; the larger of the two is the roof. Tables show the share of "
            "the roof that was reached, and a measurement below the roof is refused, because "
            "something must be wrong with it.",
            "Williams, Waterman and Patterson, Roofline (CACM, 2009)",
            (
                Test("tests/test_gpu.py::test_rooflines_are_plausible"),
                Test("tests/test_tune.py::test_a_time_below_the_roofline_is_an_error"),
            ),
            modules=("kernelcat/runtime/gpu.py", "kernelcat/report/board.py"),
        ),
        Technique(
            "Nsight Systems profiling",
            "A timeline of streams, copies and host calls shows gaps between kernels that no "
            "profile of a single kernel shows.",
            "NVIDIA, Nsight Systems User Guide",
            not_yet="no command makes a timeline; gaps are found by comparing eager calls with "
            "replayed graphs.",
        ),
        Technique(
            "Nsight Compute metrics",
            "Hardware counters tell how many bytes each level of memory moved. `kernelcat "
            "profile` runs one cold call under Nsight Compute, sums the counters over its "
            "kernels, and keeps them with the digest of the code that ran.",
            "NVIDIA, Nsight Compute documentation, metrics reference",
            (
                Counted(
                    "multicast_gemm",
                    "4096x4096x4096",
                    "cute/multicast",
                    "cute/unicast",
                    "l2_read_bytes",
                ),
                Test("tests/test_profiler.py::test_the_launches_of_a_call_are_summed"),
            ),
            modules=("kernelcat/verify/profiler.py",),
        ),
        Technique(
            "Reading machine code",
            "What a kernel does stands in its SASS, not in its source: compilers drop hints, spill "
            "registers and reorder loads. Implementations name the instruction that proves each "
            "technique, and the instruction is looked up in the disassembly.",
            "NVIDIA, CUDA Binary Utilities (nvdisasm)",
            (
                Test("tests/test_inspect.py::test_a_technique_is_proven_by_its_instruction"),
                Test(
                    "tests/test_compiles.py::test_implementations_compile_and_their_machine_code_"
                    "proves_their_techniques"
                ),
            ),
            modules=("kernelcat/verify/inspect.py",),
            aliases=("SASS",),
        ),
        Technique(
            "Cold caches and interleaved timing",
            "A loop over one call measures L2, and two loops one after the other measure the "
            "temperature. Timed calls rotate through copies of their arrays that together exceed "
            "L2, and contestants take turns in short blocks of random order, so that drift is "
            "shared by all.",
            "Hoefler and Belli, Scientific Benchmarking of Parallel Computing Systems (SC, 2015)",
            (
                Test("tests/test_bench.py::test_copies_make_l2_cold_within_free_memory"),
                Test("tests/test_bench.py::test_a_race_interleaves_randomized_blocks"),
                Test(
                    "tests/test_bench_stats.py::"
                    "test_drift_that_both_contestants_share_changes_no_ratio"
                ),
            ),
            modules=("kernelcat/bench/race.py", "kernelcat/bench/timer.py"),
        ),
        Technique(
            "Thermal states",
            "A cool chip runs at its highest clock, a hot one at what its power limit allows, and "
            "the fastest kernel may differ. Races run in both states; calls follow the hot one, "
            "because servers are hot.",
            "NVIDIA, Useful nvidia-smi Queries (clocks and throttle reasons)",
            (
                Test(
                    "tests/test_bench.py::test_a_burst_race_rests_before_every_block_and_longer_"
                    "while_the_clock_is_low"
                ),
                Test("tests/test_tune.py::test_each_state_has_its_own_race_winner_and_incumbent"),
            ),
            modules=("kernelcat/bench/states.py", "kernelcat/runtime/telemetry.py"),
            aliases=("Power throttling",),
        ),
        Technique(
            "Grace-Blackwell architecture",
            "A Grace CPU and two Blackwell GPUs share one coherent address space, so weights and "
            "caches can overflow into the CPU's memory at NVLink speed.",
            "NVIDIA, Blackwell Architecture Technical Brief (2024)",
            not_yet="the table of GPUs has GB200, and kernels compile for it; nothing has run "
            "there, and nothing uses the CPU's memory.",
        ),
        Technique(
            "NUMA awareness and CPU pinning",
            "A process that launches work should run on the cores next to its GPU, since launches "
            "and copies otherwise cross a socket.",
            "Linux kernel documentation, NUMA memory policy; NVIDIA, DGX best practices",
            not_yet="workers and engines run where the operating system puts them.",
        ),
        Technique(
            "NVLink and NVSwitch topology",
            "Which GPUs are joined by NVLink, and how, decides which collectives and which "
            "parallelism pay.",
            "NVIDIA, NVLink and NVSwitch product documentation",
            not_yet="models run on one GPU; only the tuner uses several, each on its own problems.",
        ),
    ),
)
