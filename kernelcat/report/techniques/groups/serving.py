"""Serving: many requests at once, in time."""

from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.technique import Group, Technique

_SCHEDULER = "kernelcat/moe/engine/scheduler.py"

GROUP = Group(
    "Inference serving",
    (
        Technique(
            "Continuous batching",
            "Requests join and leave the batch at every step, and nobody waits for the longest "
            "answer.",
            "Yu et al., Orca (OSDI, 2022)",
            (
                Test(
                    "tests/test_moe_scheduler.py::test_tokens_are_those_of_a_request_that_is_alone"
                ),
                Test("tests/test_moe_engine.py::test_schedules_do_not_change_greedy_tokens"),
            ),
            modules=(_SCHEDULER,),
        ),
        Technique(
            "Chunked prefill",
            "A long prompt is computed in parts, beside the tokens of those who write, so that "
            "nobody's next token waits for it.",
            "Agrawal et al., Sarathi-Serve (OSDI, 2024)",
            (
                Test(
                    "tests/test_moe_scheduler.py::"
                    "test_requests_that_write_get_a_token_in_every_step_beside_a_long_prompt"
                ),
                Test("tests/test_moe_models.py::test_a_chunked_prompt_equals_a_whole_one"),
            ),
            modules=(_SCHEDULER,),
        ),
        Technique(
            "Overlap scheduling",
            "The next step is planned and launched while the last one runs. Tokens that the host "
            "has not seen yet are gathered on the device.",
            "SGLang, Zero-Overhead Batch Scheduler (2024); Zhu et al., NanoFlow (2024)",
            (
                Test(
                    "tests/test_moe_ends.py::test_a_step_is_planned_before_the_tokens_of_the_step_"
                    "before_are_known"
                ),
                Test(
                    "tests/test_moe_scheduler.py::"
                    "test_a_shared_prompt_is_hit_in_the_middle_of_a_chunk_while_steps_overlap"
                ),
            ),
            modules=("kernelcat/moe/engine/engine.py",),
            aliases=("Asynchronous scheduling",),
        ),
        Technique(
            "Length bucketing",
            "Steps are padded to few sizes of batch and tokens, so that every kernel is compiled "
            "before the first request.",
            "TensorFlow and vLLM, bucketing of sequence lengths",
            (
                Test(
                    "tests/test_moe_step_arrays.py::"
                    "test_every_step_has_a_size_that_is_compiled_before"
                ),
                Test("tests/test_moe_step_arrays.py::test_the_largest_step_fits"),
            ),
            modules=("kernelcat/moe/engine/step_sizes.py",),
        ),
        Technique(
            "Padding overhead",
            "Prompts of several lengths are laid end to end, without padding to the longest. What "
            "a bucket adds is one more sequence in the null page.",
            "NVIDIA, FasterTransformer, Effective Transformer (2020)",
            (
                Test(
                    "tests/test_moe_step_arrays.py::"
                    "test_added_tokens_of_a_step_with_a_prompt_are_one_sequence"
                ),
                Test(
                    "tests/test_moe_step_arrays.py::"
                    "test_padding_is_sequences_of_one_token_in_slots_of_the_null_page"
                ),
            ),
            modules=("kernelcat/moe/engine/step_arrays.py",),
        ),
        Technique(
            "SequenceGroup scheduling",
            "Several answers to one prompt are scheduled as a unit and share its pages.",
            "Kwon et al., PagedAttention (SOSP, 2023)",
            does_not_apply="each answer is a request of its own; the prefix cache shares the "
            "prompt's pages among them.",
        ),
        Technique(
            "Request preemption",
            "When pages run out, the request that came last gives its pages back, and is the first "
            "to return. What it has written is computed again.",
            "Kwon et al., PagedAttention (SOSP, 2023)",
            (
                Test(
                    "tests/test_moe_scheduler.py::"
                    "test_the_last_come_is_preempted_first_and_is_first_to_return"
                ),
                Test("tests/test_moe_engine.py::test_preempted_requests_write_the_same_tokens"),
            ),
            modules=("kernelcat/moe/engine/queue.py",),
        ),
        Technique(
            "Fairness of the queue",
            "Nobody overtakes the request that waits longest, even where a shorter one would fit.",
            "Own work; first come, first served",
            (
                Test(
                    "tests/test_moe_scheduler.py::"
                    "test_nobody_overtakes_the_request_that_waits_longest"
                ),
            ),
            modules=("kernelcat/moe/engine/queue.py",),
        ),
        Technique(
            "TTFT/TPOT tracking",
            "Time to the first token, time per token, gaps between tokens and their percentiles, "
            "measured from when a request was due and not from when it was sent.",
            "Zhong et al., DistServe (OSDI, 2024)",
            (
                Test("tests/test_serving_metrics.py::test_metrics_are_as_defined"),
                Test(
                    "tests/test_moe_bench.py::"
                    "test_a_load_is_measured_from_the_time_at_which_requests_are_due"
                ),
            ),
            modules=("kernelcat/moe/serving_metrics.py",),
        ),
        Technique(
            "Goodput",
            "Requests a second that meet every objective. A server that is fast on average and "
            "late for many has little of it.",
            "Zhong et al., DistServe (OSDI, 2024)",
            (
                Test(
                    "tests/test_serving_metrics.py::"
                    "test_goodput_counts_requests_that_meet_every_objective"
                ),
            ),
            modules=("kernelcat/moe/serving_metrics.py",),
        ),
        Technique(
            "SLO enforcement",
            "The scheduler admits, orders or refuses requests by their deadlines.",
            "Gujarati et al., Clockwork (OSDI, 2020)",
            not_yet="objectives are measured (goodput), not enforced; a full queue refuses.",
        ),
        Technique(
            "Backpressure",
            "A queue has a limit, and what comes beyond it is answered at once. A client that goes "
            "away cancels its request.",
            "Welsh, Culler and Brewer, SEDA (SOSP, 2001)",
            (
                Test("tests/test_moe_limits.py::test_a_full_queue_says_so_and_empties"),
                Test("tests/test_moe_serve_faults.py::test_a_full_queue_is_an_answer"),
                Test(
                    "tests/test_moe_serve_faults.py::"
                    "test_a_client_that_goes_away_cancels_its_request"
                ),
            ),
            modules=("kernelcat/moe/engine/limits.py",),
        ),
        Technique(
            "Faults end their own requests only",
            "A step that fails answers its requests with the error; all others go on, and no page "
            "is lost.",
            "Own work; Candea and Fox, Crash-Only Software (2003)",
            (
                Test("tests/test_moe_engine.py::test_a_step_that_fails_ends_its_requests_only"),
                Test("tests/test_moe_ends.py::test_a_failed_step_ends_its_requests_and_no_other"),
            ),
            modules=("kernelcat/moe/engine/engine.py",),
        ),
        Technique(
            "Engine in a process of its own",
            "HTTP and scheduling are both Python and would take turns. In two processes a server "
            "that is behind merges pieces of output, and the engine does not notice.",
            "vLLM, V1 architecture (2025)",
            (
                Test(
                    "tests/test_moe_engine_process.py::"
                    "test_a_process_is_an_engine_and_its_end_is_seen"
                ),
            ),
            modules=("kernelcat/moe/serve/engine_process.py",),
        ),
        Technique(
            "Constrained decoding",
            "A grammar or a JSON schema says which tokens may come next, as a mask of bits that "
            "the sampling kernel reads.",
            "Dong et al., XGrammar (2024); llguidance",
            (
                Test("tests/test_moe_serve.py::test_output_fits_a_schema"),
                Test("tests/test_sample.py::test_masked_tokens_are_never_chosen"),
            ),
            modules=("kernelcat/moe/serve/grammars.py", "kernelcat/moe/engine/token_bits.py"),
            aliases=("Structured output",),
        ),
        Technique(
            "Disaggregated prefill and decode",
            "Prompts are computed on some GPUs and answers on others, and caches travel between.",
            "Zhong et al., DistServe (OSDI, 2024); Patel et al., Splitwise (ISCA, 2024)",
            (
                Test("tests/test_moe_disaggregate.py::test_two_engines_write_the_tokens_of_one"),
                Test(
                    "tests/test_moe_disaggregate.py::"
                    "test_a_request_that_is_cancelled_leaves_no_page_on_either_side"
                ),
            ),
            modules=("kernelcat/moe/disaggregate/front.py",),
        ),
    ),
)
