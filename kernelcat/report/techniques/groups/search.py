"""Search and AI-assisted optimization: who finds the fast kernel, and who believes it."""

from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "Search and AI-assisted optimization",
    (
        Technique(
            "Autotuning by races",
            "Configurations are compiled ahead, checked, screened and raced with peers; a winner "
            "must beat the last one by more than noise. Results are rows that others can import.",
            "Whaley and Dongarra, ATLAS (SC, 1998); Ansel et al., OpenTuner (2014)",
            (
                Test(
                    "tests/test_tune.py::"
                    "test_halving_finds_the_same_winner_and_a_budget_ends_screening"
                ),
                Test(
                    "tests/test_bench_stats.py::test_a_challenger_must_beat_the_incumbent_by_two_"
                    "percent"
                ),
            ),
            modules=("kernelcat/tune/problem.py", "kernelcat/bench/stats.py"),
        ),
        Technique(
            "Successive halving",
            "Many candidates are timed briefly, the better half longer, and so on.",
            "Jamieson and Talwalkar, Successive Halving (2016)",
            (
                Test(
                    "tests/test_tune_search.py::"
                    "test_halving_times_fewer_candidates_longer_and_keeps_the_best"
                ),
            ),
            modules=("kernelcat/tune/search.py",),
        ),
        Technique(
            "Analytic cost models",
            "Bytes, products and waves give an estimate for each configuration. It orders the "
            "search, is the default without measurements, and predicts for GPUs that are not here.",
            "Hong and Kim, An Analytical Model for a GPU Architecture (ISCA, 2009)",
            (
                Test(
                    "tests/test_tune_search.py::"
                    "test_candidates_take_turns_defaults_first_then_by_estimate"
                ),
                Test(
                    "tests/test_tune.py::"
                    "test_a_tune_for_another_gpu_predicts_and_notes_that_nothing_ran"
                ),
            ),
            modules=("kernelcat/catalog/cost_model.py",),
        ),
        Technique(
            "LLM kernel generation",
            "A language model writes kernels, which are compiled, checked and timed.",
            "Ouyang et al., KernelBench (2025)",
            not_yet="kernels are files; no model writes them here. What such a search needs is "
            "there: a gate, fuzzing, and races that a cheat loses.",
        ),
        Technique(
            "Autotuning with AI",
            "A learned model proposes configurations from earlier results.",
            "Chen et al., Learning to Optimize Tensor Programs (AutoTVM, 2018)",
            not_yet="the search is exhaustive, random or halving, ordered by an analytic model.",
        ),
        Technique(
            "Self-improving agents",
            "A program proposes changes to kernels, measures, and keeps what is better.",
            "Novikov et al., AlphaEvolve (2025)",
            not_yet="nothing here changes kernels by itself.",
        ),
        Technique(
            "Races that a cheat loses",
            "A kernel may return old results, work on another stream, or skip work while it is "
            "timed. The referee changes memory between blocks and judges what timed blocks wrote. "
            "Planted cheats are tried in a test.",
            "Compare the reward hacking reported for KernelBench (2025)",
            (
                Test("tests/hostile/test_cheats.py::test_every_cheat_loses_and_honest_kernels_win"),
                Test(
                    "tests/hostile/test_cheats.py::"
                    "test_seeds_differ_from_tune_to_tune_and_are_recorded"
                ),
            ),
            modules=("kernelcat/tune/referee.py",),
        ),
        Technique(
            "Mutation testing of the gate",
            "Faults are planted in kernels, and the gate must find each of them.",
            "DeMillo, Lipton and Sayward, Hints on Test Data Selection (1978)",
            (Test("tests/test_mutations.py::test_the_gate_finds_every_planted_fault"),),
            modules=("kernelcat/verify/gate.py",),
        ),
        Technique(
            "Fuzzing of kernels",
            "Random shapes, strides and configurations, shrunk to the smallest that fails. Sizes "
            "of zero are rare, because they find little.",
            "MacIver et al., Hypothesis (2019)",
            (
                Test(
                    "tests/test_fuzz.py::test_a_forgotten_tail_is_found_and_shrunk_to_one_element"
                ),
                Test(
                    "tests/test_fuzz.py::test_drawn_problems_are_legal_and_within_the_limit_and_"
                    "few_are_empty"
                ),
            ),
            modules=("kernelcat/verify/fuzz.py",),
        ),
        Technique(
            "Sanitizer runs",
            "Four tools of compute-sanitizer look for accesses out of bounds, races, misused "
            "barriers and uninitialized reads. Hazards that a barrier in the machine code rules "
            "out are counted apart. Ranks run under a tool each.",
            "NVIDIA, Compute Sanitizer documentation",
            (
                Test("tests/test_sanitizer.py::test_one_byte_out_of_bounds_is_reported"),
                Test(
                    "tests/test_sanitizer.py::"
                    "test_a_hazard_listed_as_ordered_is_no_error_in_its_example"
                ),
                Test(
                    "tests/test_ranks_sanitizer.py::"
                    "test_every_rank_runs_under_every_tool_and_the_receipt_has_the_errors_of_all"
                ),
            ),
            modules=("kernelcat/verify/sanitizer.py", "kernelcat/ranks/sanitize.py"),
        ),
    ),
)
