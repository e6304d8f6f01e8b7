"""Decoding and attention beyond the basics."""

from kernelcat.report.techniques.code import Launch
from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.measured import Effect, Kept
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "Advanced decoding and attention",
    (
        Technique(
            "FlashMLA",
            "Decoding of latent attention: all heads share one row of 576 elements a token, so 64 "
            "or 128 rows of queries meet each tile. DeepSeek's kernel is a peer in the same races.",
            "DeepSeek, FlashMLA (2025)",
            (
                Effect("flashmla", "1x1-128-4096", "cute/split", "peer/flash_mla", state="burst"),
                Effect("flashmla", "1x1-128-32768", "cuda/wgmma", "peer/flash_mla", state="burst"),
                Effect("flashmla", "64x1-128-4096", "cuda/wgmma", "peer/flashinfer"),
            ),
        ),
        Technique(
            "Absorbed MLA",
            "The up-projections of keys and values are multiplied into queries and results, so "
            "that decoding reads latents and never builds keys.",
            "DeepSeek-AI, DeepSeek-V2 (2024), section 2.1",
            (
                Test("tests/test_mla.py::test_a_served_layer_equals_that_of_transformers"),
                Test("tests/test_mla_prefill.py::test_prefill_equals_attention_in_latent_space"),
            ),
            modules=("kernelcat/layers/mla.py",),
        ),
        Technique(
            "Sparse MLA (slot lists)",
            "Each query lists the slots that it attends to. Lists are a block table of pages of "
            "one token, so the dense kernels serve them by gathering.",
            "DeepSeek-AI, DeepSeek-V3.2-Exp (2025)",
            (
                Effect("flashmla", "sparse-1x1-128-2048", "cute/split", "peer/flashinfer"),
                Test("tests/test_mla_sparse.py::test_a_token_attends_to_the_slots_that_it_lists"),
            ),
            modules=("kernelcat/layers/mla.py", "kernels/cuda/flashmla/latent_gatherer.cuh"),
        ),
        Technique(
            "GQA/MQA",
            "Several query heads share keys and values. Kernels pack these heads into the rows of "
            "one product, so that each key is read once for all of them.",
            "Shazeer, Multi-Query Attention (2019); Ainslie et al., GQA (2023)",
            (
                Effect(
                    "paged_attn", "decode-128x4096-32/8x128-p16-nvfp4", "cuda/split", "cute/naive"
                ),
                Test("tests/test_paged_attn_cuda.py::test_registers_is_right_on_the_host"),
            ),
        ),
        Technique(
            "Flash-decoding split and merge",
            "One long sequence is divided among many blocks, each with its own sums, which are "
            "merged by their log-sum-exps.",
            "Dao, Haziza, Massa and Sizov, Flash-Decoding (2023)",
            (
                Effect(
                    "paged_attn", "decode-16x32768-32/8x128-p16", "triton/split", "triton/tiled"
                ),
                Effect("flashmla", "32x1-128-32768", "triton/split", "triton/tiled"),
                Kept("paged_attn/cute/split", "splits", (2, 3, 4, 8, 16, 32, 64)),
            ),
        ),
        Technique(
            "Cascade and shared-prefix attention",
            "A prefix that many requests share is attended to once for all their queries, and the "
            "result is merged with that of each request's own keys.",
            "Ye et al., Cascade Inference (FlashInfer, 2024); Juravsky et al., Hydragen (2024)",
            (
                Effect("attn_merge", "2x4096-32x128", "cuda/vectorized", "peer/torch"),
                Test(
                    "tests/test_paged_attn_gpu.py::test_halves_of_the_context_merge_into_the_whole"
                ),
            ),
            not_yet="the engine does not group requests by prefix: the merge is there, and who "
            "calls the entries can do it.",
            aliases=("Hydragen",),
        ),
        Technique(
            "Attention sinks",
            "Each head has one more logit without a value, so that its weights may sum to less "
            "than one. It costs a load before the first tile.",
            "Xiao et al., StreamingLLM (2023); OpenAI, gpt-oss (2025)",
            (Test("tests/test_moe_models.py::test_logits_equal_those_of_transformers"),),
        ),
        Technique(
            "Sliding windows",
            "A query sees the last tokens only, and a kernel starts at the first page that it "
            "sees.",
            "Beltagy et al., Longformer (2020); Jiang et al., Mistral 7B (2023)",
            (
                Test(
                    "tests/test_paged_attn.py::"
                    "test_the_number_of_visible_pairs_equals_a_count_by_loops"
                ),
            ),
        ),
        Technique(
            "Small batches from registers",
            "With a few thousand cached tokens latency decides. Keys go from memory into registers "
            "in the layout of the product, without shared memory, barriers or a plan. Through "
            "shared memory they take fewer registers, and the next launch has room beside it.",
            "Own work",
            (
                Effect(
                    "paged_attn",
                    "decode-64x1024-64/8x64-p16-window128-sinks",
                    "cuda/staged",
                    "cuda/registers",
                ),
                Launch("paged_attn/cuda/registers", "decode-1x3008-64/8x64-p16-sinks", "cluster"),
            ),
        ),
        Technique(
            "Nested Jagged Tensors (NJT)",
            "Sequences of different lengths lie end to end with an array of offsets. torch has a "
            "tensor type for it; entries take the offsets themselves (cu_q).",
            "PyTorch documentation, torch.nested, jagged layout",
            (
                Test(
                    "tests/test_paged_attn.py::"
                    "test_ragged_batches_have_empty_sequences_and_whole_pages"
                ),
            ),
            aliases=("Ragged batches",),
        ),
        Technique(
            "Draft model speculation",
            "A small model writes ahead, and the large one checks several tokens in one step.",
            "Leviathan, Kalman and Matias, Speculative Decoding (2022)",
            not_yet="drafts come from n-grams of the request; verification is that of any draft.",
        ),
        Technique(
            "n-gram speculation",
            "Drafts are what followed the same words earlier in the request. It needs no second "
            "model, and pays for texts that repeat their source.",
            "Saxena, Prompt Lookup Decoding (2023)",
            (
                Test(
                    "tests/test_moe_speculation.py::"
                    "test_a_draft_follows_the_longest_and_latest_match"
                ),
                Test(
                    "tests/test_moe_scheduler.py::"
                    "test_speculation_needs_fewer_steps_and_takes_back_rejected_slots"
                ),
            ),
            modules=("kernelcat/moe/engine/speculation.py",),
            aliases=("Prompt lookup", "n-gram and draft speculation"),
        ),
        Technique(
            "Token acceptance/rejection",
            "Drafts are accepted as long as they equal what plain decoding would draw, which "
            "depends on seed and position alone. Tokens therefore never change, greedy or sampled.",
            "Leviathan, Kalman and Matias (2022); Saxena (2023)",
            (
                Test(
                    "tests/test_moe_speculation.py::"
                    "test_accepted_tokens_are_those_of_plain_decoding"
                ),
                Test("tests/test_moe_engine.py::test_accepted_drafts_save_steps_and_keep_tokens"),
            ),
            modules=("kernelcat/moe/engine/speculation.py",),
        ),
        Technique(
            "KV cache pool",
            "What memory is left after weights and workspaces becomes pages, divided among groups "
            "of layers so that all serve as many requests.",
            "Kwon et al., PagedAttention (SOSP, 2023)",
            (
                Test(
                    "tests/test_moe_engine.py::"
                    "test_memory_is_divided_so_that_all_groups_serve_as_many_requests"
                ),
                Test(
                    "tests/test_moe_engine_gpu.py::"
                    "test_pages_take_the_memory_that_is_left_and_too_little_is_told"
                ),
            ),
            modules=("kernelcat/moe/engine/memory.py",),
        ),
        Technique(
            "ThunderMLA and megakernels",
            "A whole layer, or a whole model, is one persistent kernel whose parts wait for each "
            "other by counters.",
            "Spector et al., ThunderMLA and Look Ma, No Bubbles! (Hazy Research, 2025)",
            not_yet="a layer is up to seven launches that overlap by programmatic dependent "
            "launch.",
            aliases=("ThunderMLA / Megakernels", "Megakernels with counters"),
        ),
        Technique(
            "FlexDecoding",
            "A compiler makes an attention kernel from a user's function of scores and masks.",
            "Dong et al., FlexAttention (2024)",
            not_yet="windows, sinks, soft caps and scales are axes of the entry; functions of the "
            "user are not taken.",
            aliases=("FlexAttention",),
        ),
        Technique(
            "POD-Attention",
            "Prefill and decode share an SM, so that one computes while the other waits for "
            "memory.",
            "Kamath et al., POD-Attention (ASPLOS, 2025)",
            not_yet="a batch of both runs in one launch, but blocks are not paired on an SM.",
        ),
    ),
)
