"""Dynamic and adaptive inference: changing course while requests run."""

from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "Dynamic and adaptive inference",
    (
        Technique(
            "Adaptive parallelism",
            "The number of GPUs of a request follows the load.",
            "Li et al., AlpaServe (OSDI, 2023)",
            not_yet="models run on one GPU.",
        ),
        Technique(
            "Dynamic precision switching",
            "A model runs in fewer bits while load is high.",
            "Survey in Gholami et al., Quantization Methods for Efficient Inference (2021)",
            not_yet="precision is fixed when a model is loaded.",
        ),
        Technique(
            "Entropy-based precision",
            "The uncertainty of the next token decides how many bits the step has.",
            "Survey in Gholami et al., Quantization Methods for Efficient Inference (2021)",
            not_yet="precision is fixed when a model is loaded.",
        ),
        Technique(
            "Per-token precision",
            "Some tokens of a batch are computed or cached in more bits than others.",
            "Survey in Gholami et al., Quantization Methods for Efficient Inference (2021)",
            not_yet="all tokens have one precision; scales do differ by token and block.",
        ),
        Technique(
            "Memory pressure triggers",
            "When pages run out, drafts are dropped first, cached prefixes are reused oldest "
            "first, and at last a request is preempted.",
            "Kwon et al., PagedAttention (SOSP, 2023)",
            (
                Test(
                    "tests/test_moe_scheduler.py::test_drafts_are_dropped_before_anybody_is_preempted"
                ),
                Test(
                    "tests/test_moe_blocks.py::"
                    "test_cached_pages_are_reused_last_and_in_the_order_of_their_release"
                ),
                Test(
                    "tests/test_moe_scheduler.py::"
                    "test_a_running_request_has_a_page_to_spare_before_another_starts"
                ),
            ),
            modules=("kernelcat/moe/engine/scheduler.py", "kernelcat/moe/engine/queue.py"),
        ),
        Technique(
            "Kernel choice by measured results",
            "Each call runs what was measured fastest for its shape on this GPU, else for the "
            "nearest shape, else what a model estimates. explain says which, and why.",
            "Whaley and Dongarra, ATLAS (SC, 1998)",
            (
                Test("tests/test_choose.py::test_the_better_evidence_comes_first"),
                Test(
                    "tests/test_choose.py::test_without_better_evidence_the_nearest_problem_decides"
                ),
                Test(
                    "tests/test_moe_mlp_choice.py::"
                    "test_the_winner_of_a_near_problem_declines_many_rows_an_expert"
                ),
            ),
            modules=("kernelcat/call/choice.py",),
        ),
        Technique(
            "Worker pool routing",
            "Requests go to the worker with room, or with their prefix in its cache.",
            "NVIDIA, Dynamo documentation; SGLang Router",
            not_yet="a server has one engine.",
        ),
        Technique(
            "Pipeline bubble mitigation",
            "Stages of a pipeline, or host and device, wait for each other unless work overlaps. "
            "The engine's bubble between steps is hidden, because the next step is launched ahead.",
            "Huang et al., GPipe (2019)",
            (
                Test(
                    "tests/test_moe_ends.py::test_a_step_is_planned_before_the_tokens_of_the_step_"
                    "before_are_known"
                ),
                Test(
                    "tests/test_moe_ends.py::"
                    "test_no_step_is_planned_for_a_request_whose_last_token_is_in_flight"
                ),
            ),
            modules=("kernelcat/moe/engine/engine.py",),
            not_yet="bubbles of pipeline parallelism: there is one GPU.",
        ),
    ),
)
