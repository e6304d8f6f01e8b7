"""Peers of `paged_attn`: torch, FlashAttention-4 and FlashInfer."""

from __future__ import annotations

from kernelcat.errors import Unsupported
from kernelcat.reference._flashinfer import import_flashinfer, page_lists, workspace
from kernelcat.reference._peers import import_torch, required_by
from kernelcat.reference._sequences import lengths
from kernelcat.reference.paged_attn import sm_scale


def _is_even(problem):
    """Whether every sequence fills its row of the table and has max_q queries."""
    tokens = problem["batch"] * problem["max_q"]
    return problem["lengths"] == "equal" and problem["tokens"] == tokens


def _is_prefill(problem):
    """Whether all tokens are queries, in a problem that is even."""
    return problem["max_q"] == problem["table_width"] * problem["page_size"]


def _gathered(arrays):
    """Keys and values (batch, tokens, kv_heads, head_dim), copied from the pages of full rows."""
    table = arrays["block_table"].long()
    return [arrays[name][table].flatten(1, 2) for name in ("k_cache", "v_cache")]


def sdpa():
    """torch's attention over contiguous keys and values, which are gathered before the race."""
    torch = import_torch("sdpa")

    def make(problem, arrays):
        extras = ("window", "softcap", "has_sinks", "has_scales")
        if problem["kv_dtype"] != problem["dtype"] or any(problem[name] for name in extras):
            raise Unsupported("torch's attention has no window, cap, sinks or scales")
        q_len = problem["max_q"]
        if not _is_even(problem) or not (q_len == 1 or _is_prefill(problem)):
            raise Unsupported("torch's attention is raced over sequences of one length")
        batch, heads, dim = problem["batch"], problem["heads"], problem["head_dim"]
        k, v = (x.transpose(1, 2).contiguous() for x in _gathered(arrays))
        q = arrays["q"].reshape(batch, q_len, heads, dim).transpose(1, 2)
        out = arrays["out"].reshape(batch, q_len, heads, dim).transpose(1, 2)
        attend = torch.nn.functional.scaled_dot_product_attention
        scale, is_causal = sm_scale(problem), q_len > 1
        return lambda: out.copy_(
            attend(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=heads > k.shape[1])
        )

    return make


def flash_attn_4():
    """FlashAttention-4 over the pages; in prefill over keys that are gathered before the race.

    FlashAttention-4's public functions return a new array, so the race calls the function below
    them, which takes ``out``. On Hopper FlashAttention-4 does not split sequences, and loads by TMA
    only pages of 128 tokens.
    """
    with required_by("flash_attn_4", "pip install flash-attn-4"):
        import torch
        from flash_attn.cute.interface import _flash_attn_fwd as attend

    def make(problem, arrays):
        if problem["kv_dtype"] != problem["dtype"] or problem["has_scales"]:
            raise Unsupported("FlashAttention-4 is raced without scales, over a cache of q's type")
        q_len, is_even = problem["max_q"], _is_even(problem)
        options = {
            "softmax_scale": sm_scale(problem),
            "causal": q_len > 1,
            "window_size_left": problem["window"] - 1 if problem["window"] else None,
            "softcap": problem["softcap"],
            "learnable_sink": arrays.get("sinks"),
            # 0: FlashAttention-4 chooses the number of splits
            "num_splits": 0 if torch.cuda.get_device_capability()[0] > 9 else 1,
        }
        q, options["out"] = arrays["q"], arrays["out"]
        if is_even:
            rows = (problem["batch"], q_len, problem["heads"], problem["head_dim"])
            q, options["out"] = q.view(rows), arrays["out"].view(rows)
        else:
            options |= {"cu_seqlens_q": arrays["cu_q"], "max_seqlen_q": q_len}
        if is_even and _is_prefill(problem):
            k, v = _gathered(arrays)
        else:
            k, v = arrays["k_cache"], arrays["v_cache"]
            options |= {"page_table": arrays["block_table"], "seqused_k": arrays["kv_lens"]}
        return lambda: attend(q, k, v, **options)

    return make


def flashinfer():
    """FlashInfer's wrappers for decode and prefill; ``plan`` runs on the host before the race."""
    library = import_flashinfer()

    def make(problem, arrays):
        q_lens, kv_lens = lengths(problem)
        if problem["kv_dtype"] != problem["dtype"] or problem["has_sinks"]:
            raise Unsupported("FlashInfer is raced without sinks, over a cache of q's type")
        if not all(kv_lens) or not all(q_lens):
            raise Unsupported("FlashInfer is raced without empty sequences")
        size, table = problem["page_size"], arrays["block_table"]
        lists = page_lists(table, kv_lens, size, "cpu")
        scratch = workspace(table.device)
        sizes = (problem["heads"], problem["kv_heads"], problem["head_dim"], size)
        options = {
            "sm_scale": sm_scale(problem),
            "window_left": problem["window"] - 1,
            "logits_soft_cap": problem["softcap"],
            "q_data_type": arrays["q"].dtype,
            "kv_data_type": arrays["k_cache"].dtype,
        }
        if problem["max_q"] == 1:
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(scratch, use_tensor_cores=True)
            wrapper.plan(*lists, *sizes, **options)
        else:
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(scratch)
            wrapper.plan(arrays["cu_q"], *lists, *sizes, causal=True, **options)
        cache, out = (arrays["k_cache"], arrays["v_cache"]), arrays["out"]
        return lambda: wrapper.run(arrays["q"], cache, out=out)

    return make
