"""Mixture of experts: routing, grouped products, and what spreads experts over GPUs."""

from kernelcat.report.techniques.code import Instruction
from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.measured import Effect
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "Mixture of experts",
    (
        Technique(
            "Expert routing",
            "A router's logits select the few experts of each token, and index maps sort tokens by "
            "expert. One or two launches do it all, up to the offsets of a grouped product.",
            "Shazeer et al., Outrageously Large Neural Networks (2017); DeepSeek-V3 (2024)",
            (
                Effect("moe_route", "8192-256-top8", "cuda/sorted", "peer/tokenspeed"),
                Effect("moe_route", "qwen3-30b-64", "cuda/sorted", "peer/torch"),
                Test(
                    "tests/test_moe_route.py::"
                    "test_the_best_groups_have_the_best_two_experts_together"
                ),
            ),
            modules=("reference/moe_route.py",),
        ),
        Technique(
            "Routing within the first product",
            "With few tokens each block routes by itself, from the logits, while its weights are "
            "on the way; a launch is saved.",
            "Own work",
            (
                Effect("moe_mlp", "gptoss-1-mxfp4", "cuda/stream", "cuda/grouped"),
                Test("tests/test_moe_mlp.py::test_few_tokens_are_routed_inside_of_the_products"),
                Test("tests/test_moe_mlp.py::test_stream_multiplies_on_the_host"),
            ),
            modules=("kernels/cuda/moe_mlp/router.cuh",),
        ),
        Technique(
            "Grouped products with device-side counts",
            "All experts are one launch. Each block finds its tile in the counts that routing left "
            "in memory, so the host knows none of them, and a graph serves every routing.",
            "Gale et al., MegaBlocks (2023); CUTLASS, Grouped GEMM",
            (
                Effect("moe_mlp", "gptoss-1024-mxfp4", "cuda/grouped", "peer/triton_kernels"),
                Test("tests/test_moe_gemm.py::test_launches_depend_on_axes_only"),
                Test("tests/test_moe_gemm.py::test_a_kernel_of_tensor_cores_is_right_on_the_host"),
            ),
            modules=("kernels/cuda/moe_gemm/expert_tiles.cuh",),
        ),
        Technique(
            "Gather fused into loads",
            "Rows of the activations are fetched by the sorted order itself, by asynchronous "
            "copies on Hopper and by gathering TMA on Blackwell. No permuted copy is written.",
            "Guo et al., SonicMoE (2025); NVIDIA, PTX ISA, tiled::gather4",
            (
                Test("tests/test_moe_gemm.py::test_a_kernel_of_tensor_cores_is_right_on_the_host"),
                Instruction("UTMALDG.2D.GATHER4"),
            ),
            modules=("kernels/cuda/moe_gemm/producer.cuh",),
        ),
        Technique(
            "Sparse activation",
            "Only the chosen experts' weights are read: 4 of 32 or 128 for a token. Few tokens "
            "are bounded by these bytes, and the roofline counts them.",
            "Shazeer et al., Outrageously Large Neural Networks (2017)",
            (
                Effect("moe_mlp", "gptoss-1-bf16", "", "", other_problem="gptoss-64-bf16"),
                Test("tests/test_moe_mlp.py::test_stream_multiplies_on_the_host"),
                Test("tests/test_moe_mlp_choice.py::test_rows_of_an_expert_decide_and_not_tokens"),
            ),
            modules=("kernels/cuda/moe_mlp/stream.cu",),
        ),
        Technique(
            "Load balancing",
            "A correction is added to the scores by which experts are selected, and not to their "
            "weights, so that busy experts are chosen less often. Routing adds to a count of the "
            "load, from which a correction can be made.",
            "DeepSeek-AI, DeepSeek-V3 Technical Report (2024), auxiliary-loss-free balancing",
            (
                Test("tests/test_moe_route.py::test_the_correction_selects_but_has_no_weight"),
                Test("tests/test_moe_route.py::test_load_is_updated_where_out_has_it"),
            ),
        ),
        Technique(
            "Capacity factor and token dropping",
            "An expert serves a limited number of tokens. Those beyond are dropped, or rerouted to "
            "the next best expert with room, in rounds.",
            "Lepikhin et al., GShard (2020); Fedus et al., Switch Transformers (2021)",
            (
                Test("tests/test_moe_route.py::test_the_first_assignments_of_a_full_expert_stay"),
                Test(
                    "tests/test_moe_route.py::"
                    "test_a_rerouted_assignment_keeps_its_slot_and_weighs_as_its_new_expert"
                ),
                Test(
                    "tests/test_moe_route_cuda.py::"
                    "test_a_kernel_is_right_and_leaves_its_workspaces_ready"
                ),
            ),
        ),
        Technique(
            "Experts in 4 bits",
            "Published MXFP4 weights stay packed in memory and are decoded between shared memory "
            "and tensor cores.",
            "OpenAI, gpt-oss model card (2025)",
            (
                Effect("moe_mlp", "gptoss-256-mxfp4", "cuda/grouped", "peer/humming"),
                Test("tests/test_moe_checkpoints.py::test_experts_stay_in_4_bits"),
                Test("tests/test_moe_gemm.py::test_every_format_agrees_with_the_formulation"),
            ),
            modules=("kernels/cuda/moe_gemm/decoded.cu",),
        ),
        Technique(
            "Shared experts",
            "One expert serves every token beside the chosen ones, so that these need not all "
            "learn the same.",
            "Dai et al., DeepSeekMoE (2024)",
            (Test("tests/test_moe_models.py::test_logits_equal_those_of_transformers"),),
            modules=("kernelcat/moe/deepseek_v3.py",),
        ),
        Technique(
            "Upcycling",
            "A dense model becomes a mixture of experts that computes the same: by copies, or by "
            "dividing the columns of its MLP.",
            "Komatsuzaki et al., Sparse Upcycling (2022)",
            (Test("tests/test_moe_upcycle.py::test_logits_are_those_of_the_dense_model"),),
            modules=("kernelcat/moe/upcycle.py",),
        ),
        Technique(
            "Stream-overlapped experts",
            "Experts run as products of their own in several streams, to fill the chip together.",
            "Hwang et al., Tutel (2022)",
            does_not_apply="all experts are one grouped launch, which fills the chip without "
            "streams.",
        ),
        Technique(
            "Expert parallelism",
            "Each GPU has some of the experts, and tokens travel to them.",
            "Lepikhin et al., GShard (2020)",
            not_yet="models run on one GPU.",
        ),
        Technique(
            "All-to-all communication",
            "Every GPU sends each other one the tokens of its experts, and gets results back.",
            "Hwang et al., Tutel (2022)",
            not_yet="models run on one GPU.",
        ),
        Technique(
            "Dispatch and combine kernels",
            "Kernels send rows to the GPUs of their experts, and add up what comes back, over "
            "NVLink and InfiniBand.",
            "DeepSeek, DeepEP (2025)",
            not_yet="models run on one GPU; the sorted order that such a dispatch needs is there.",
            aliases=("Dispatch/combine all-to-all",),
        ),
        Technique(
            "Expert rebalancing",
            "Busy experts get replicas on other GPUs, by counts of their load.",
            "DeepSeek, Expert Parallelism Load Balancer (2025)",
            not_yet="there is one GPU to place experts on; routing counts the load that it needs.",
            aliases=("EPLB",),
        ),
    ),
)
