"""Paged attention: a cache in pages."""

from kernelcat.report.techniques.evidence import Test
from kernelcat.report.techniques.measured import Effect, Reached
from kernelcat.report.techniques.technique import Group, Technique

GROUP = Group(
    "PagedAttention",
    (
        Technique(
            "Block-based KV cache",
            "Keys and values of a sequence lie in pages of 16 or 64 tokens, anywhere in memory. "
            "The kernels read through the table about as fast as others read contiguous keys.",
            "Kwon et al., PagedAttention (SOSP, 2023)",
            (
                Reached("paged_attn", "decode-128x2048-32/8x128-p64", "cute/split", 0.8),
                Effect("paged_attn", "decode-1x8192-64/8x64-p16", "cuda/tma", "peer/sdpa"),
                Test(
                    "tests/test_moe_blocks.py::"
                    "test_a_pool_gives_each_page_once_and_never_the_null_page"
                ),
            ),
            modules=("reference/paged_attn.py", "kernelcat/moe/engine/pages.py"),
            aliases=("PagedAttention",),
        ),
        Technique(
            "Dynamic allocation",
            "A request takes a page when its last one is full, and not for the longest answer that "
            "it might give.",
            "Kwon et al., PagedAttention (SOSP, 2023)",
            (
                Test("tests/test_moe_blocks.py::test_a_failed_extension_changes_nothing"),
                Test(
                    "tests/test_moe_scheduler.py::"
                    "test_a_running_request_has_a_page_to_spare_before_another_starts"
                ),
            ),
            modules=("kernelcat/moe/engine/blocks.py",),
        ),
        Technique(
            "Memory fragmentation fix",
            "All pages of a group of layers have one size, so a free page fits every request, and "
            "what is wasted is the end of a last page.",
            "Kwon et al., PagedAttention (SOSP, 2023)",
            (
                Test("tests/test_moe_scheduler.py::test_a_crowd_ends_in_a_tiny_cache"),
                Test("tests/test_moe_blocks.py::test_each_planted_fault_is_found"),
            ),
            modules=("kernelcat/moe/engine/integrity.py",),
        ),
        Technique(
            "Pages of sliding windows",
            "A layer with a window gives pages back that no later query reads. Such layers are a "
            "group with a table of its own.",
            "vLLM, Hybrid KV Cache Manager (2025)",
            (
                Test(
                    "tests/test_moe_blocks.py::test_pages_of_a_window_do_not_grow_with_the_request"
                ),
                Test("tests/test_moe_models.py::test_pages_before_the_window_need_not_be_kept"),
            ),
            modules=("kernelcat/moe/cache.py",),
        ),
        Technique(
            "Prefix caching",
            "Full blocks are found again by a hash over all tokens before their end. Requests with "
            "the same beginning share pages, without a copy.",
            "Zheng et al., SGLang, RadixAttention (2023); vLLM, Automatic Prefix Caching",
            (
                Test("tests/test_moe_scheduler.py::test_a_prefix_hit_equals_a_cold_run"),
                Test("tests/test_moe_blocks.py::test_full_blocks_are_shared_without_a_copy"),
                Test("tests/test_moe_engine.py::test_a_prefix_hit_gives_the_tokens_of_a_cold_run"),
            ),
            modules=("kernelcat/moe/engine/block_hashes.py",),
            aliases=("Prefix sharing / KV reuse",),
        ),
        Technique(
            "Offload to host memory",
            "Blocks that leave the prefix cache are copied to pinned host memory before their "
            "pages are reused, and come back where copying beats computing. Steps wait for "
            "neither direction.",
            "LMCache (2024); vLLM, KV connectors (2025)",
            (
                Test("tests/test_moe_host_cache.py::test_steps_of_others_run_while_blocks_arrive"),
                Test(
                    "tests/test_moe_host_engine.py::"
                    "test_a_fetched_prefix_gives_the_tokens_of_a_cold_run"
                ),
                Test(
                    "tests/test_moe_streams.py::"
                    "test_late_copies_to_host_memory_and_back_change_no_token"
                ),
            ),
            modules=("kernelcat/moe/engine/host_cache.py",),
        ),
        Technique(
            "Page table translation",
            "A kernel looks up the page of each tile before it loads the tile, a round ahead. "
            "Entries beyond a sequence are poison in tests, and must not be followed.",
            "Kwon et al., PagedAttention (SOSP, 2023); FlashMLA's tests (DeepSeek, 2025)",
            (
                Test(
                    "tests/test_paged_attn.py::"
                    "test_visible_tokens_are_numbers_and_all_other_slots_are_poison"
                ),
                Test("tests/test_paged_attn_cuda.py::test_registers_is_right_on_the_host"),
            ),
            modules=("kernels/cuda/include/kernelcat/token_slots.cuh",),
        ),
        Technique(
            "Rotation fused with the cache write",
            "Queries and keys are rotated (RoPE), keys and values are quantized and written to "
            "their slots, in one pass over the projections.",
            "FlashInfer, fused RoPE and append (2025)",
            (
                Effect("kv_write", "prefill-8192-32/8x128-fp8", "cute/vectorized", "peer/torch"),
                Test(
                    "tests/test_kv_write.py::"
                    "test_each_new_token_has_a_slot_and_all_that_is_not_read_is_poison"
                ),
            ),
        ),
    ),
)
