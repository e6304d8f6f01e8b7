"""Other people's attention over a paged cache, raced beside `paged_attn`."""

from __future__ import annotations

import itertools

from kernelcat.errors import MissingDependency, Unsupported
from kernelcat.reference.paged_attn import lengths, sm_scale


def _is_even(problem):
    """Whether tables are full and every sequence has max_q queries."""
    tokens = problem["batch"] * problem["max_q"]
    return problem["lengths"] == "equal" and problem["tokens"] == tokens


def _gathered(arrays):
    """Keys and values of full tables, (batch, tokens, kv_heads, head_dim), out of their pages."""
    table = arrays["block_table"].long()
    return [arrays[name][table].flatten(1, 2) for name in ("k_cache", "v_cache")]


def sdpa():
    """torch's attention over the same keys and values, gathered ahead of time."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer sdpa needs torch: pip install torch") from error

    def make(problem, arrays):
        extras = ("window", "softcap", "has_sinks", "has_scales")
        if problem["kv_dtype"] != problem["dtype"] or any(problem[name] for name in extras):
            raise Unsupported("torch's attention has no window, cap, sinks or scales")
        q_len = problem["max_q"]
        if not _is_even(problem) or q_len not in (1, problem["table_width"] * problem["page_size"]):
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
    """FlashAttention-4 over the pages; where all tokens ask, over keys gathered ahead of time.

    Its public functions return a new array; the one below them writes where it is told. On Hopper
    it splits no sequence, and loads by TMA only pages of 128 tokens.
    """
    try:
        import torch
        from flash_attn.cute.interface import _flash_attn_fwd as attend
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer flash_attn_4 needs: pip install flash-attn-4") from error

    def make(problem, arrays):
        if problem["kv_dtype"] != problem["dtype"] or problem["has_scales"]:
            raise Unsupported("FlashAttention-4 is raced without scales, over a cache of q's type")
        q_len = problem["max_q"]
        options = {
            "softmax_scale": sm_scale(problem),
            "causal": q_len > 1,
            "window_size_left": problem["window"] - 1 if problem["window"] else None,
            "softcap": problem["softcap"],
            "learnable_sink": arrays.get("sinks"),
            # 0: as many as it thinks best
            "num_splits": 0 if torch.cuda.get_device_capability()[0] > 9 else 1,
        }
        q, options["out"] = arrays["q"], arrays["out"]
        if _is_even(problem):
            rows = (problem["batch"], q_len, problem["heads"], problem["head_dim"])
            q, options["out"] = q.view(rows), arrays["out"].view(rows)
        else:
            options |= {"cu_seqlens_q": arrays["cu_q"], "max_seqlen_q": q_len}
        if _is_even(problem) and q_len == problem["table_width"] * problem["page_size"]:
            k, v = _gathered(arrays)
        else:
            k, v = arrays["k_cache"], arrays["v_cache"]
            options |= {"page_table": arrays["block_table"], "seqused_k": arrays["kv_lens"]}
        return lambda: attend(q, k, v, **options)

    return make


def flashinfer():
    """FlashInfer's wrappers; what they plan on the host is done ahead of time."""
    try:
        import flashinfer
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "the peer flashinfer needs: pip install flashinfer-python"
        ) from error

    def make(problem, arrays):
        q_lens, kv_lens = lengths(problem)
        if problem["kv_dtype"] != problem["dtype"] or problem["has_sinks"]:
            raise Unsupported("FlashInfer is raced without sinks, over a cache of q's type")
        if not all(kv_lens) or not all(q_lens):
            raise Unsupported("FlashInfer is raced without empty sequences")
        size, table = problem["page_size"], arrays["block_table"]
        counts = [-(-kv_len // size) for kv_len in kv_lens]
        pages = torch.cat([table[s, :count] for s, count in enumerate(counts)])
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        last = torch.tensor([(n - 1) % size + 1 for n in kv_lens], dtype=torch.int32)
        memory = torch.zeros(256 << 20, dtype=torch.uint8, device=table.device)
        sizes = (problem["heads"], problem["kv_heads"], problem["head_dim"], size)
        options = {
            "sm_scale": sm_scale(problem),
            "window_left": problem["window"] - 1,
            "logits_soft_cap": problem["softcap"],
            "q_data_type": arrays["q"].dtype,
            "kv_data_type": arrays["k_cache"].dtype,
        }
        if problem["max_q"] == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory, use_tensor_cores=True)
            wrapper.plan(starts, pages, last, *sizes, **options)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory)
            wrapper.plan(arrays["cu_q"], starts, pages, last, *sizes, causal=True, **options)
        cache, out = (arrays["k_cache"], arrays["v_cache"]), arrays["out"]
        return lambda: wrapper.run(arrays["q"], cache, out=out)

    return make
