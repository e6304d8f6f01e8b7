"""Peers of `flashmla`: DeepSeek's FlashMLA and FlashInfer."""

from __future__ import annotations

import inspect

from kernelcat.errors import Unsupported
from kernelcat.reference._flashinfer import import_flashinfer, page_lists, workspace
from kernelcat.reference._mla_row import LATENT, ROPE
from kernelcat.reference._peers import required_by
from kernelcat.reference._sequences import lengths


def flash_mla():
    """DeepSeek's FlashMLA, from a build whose ``flash_mla_with_kvcache`` takes ``out``.

    The published function returns a new array, and a copy into ``out`` would count as its time. The
    schedule is made once before the race, as FlashMLA's documentation does for the layers of one
    decoding step.
    """
    with required_by("flash_mla", "a build of FlashMLA"):
        from flash_mla import flash_mla_with_kvcache as attend
        from flash_mla import get_mla_metadata

    def make(problem, arrays):
        batch, q_len, size = problem["batch"], problem["max_q"], problem["page_size"]
        if problem["kv_dtype"] != problem["dtype"] or size != 64:
            raise Unsupported("FlashMLA is raced over a cache of q's type, in pages of 64")
        if problem["tokens"] != batch * q_len or problem["lengths"] != "equal":
            raise Unsupported("FlashMLA is raced with equally many queries in every sequence")
        if "out" not in inspect.signature(attend).parameters:
            raise Unsupported("this build of FlashMLA has no argument out")
        q = arrays["q"].view(batch, q_len, *arrays["q"].shape[1:])
        out = arrays["out"].view(batch, q_len, *arrays["out"].shape[1:])
        cache, schedule = arrays["kv_cache"].unsqueeze(2), get_mla_metadata()[0]
        table, lens, scale = arrays["block_table"], arrays["kv_lens"], problem["sm_scale"]
        return lambda: attend(
            q, cache, table, lens, LATENT, schedule, softmax_scale=scale, causal=True, out=out
        )

    return make


def flashinfer():
    """FlashInfer's wrapper for latent attention; ``plan`` runs on the host before the race."""
    library = import_flashinfer()

    def make(problem, arrays):
        q_lens, kv_lens = lengths(problem)
        if problem["kv_dtype"] != problem["dtype"]:
            raise Unsupported("FlashInfer is raced over a cache of q's type")
        if not all(kv_lens) or not all(q_lens):
            raise Unsupported("FlashInfer is raced without empty sequences")
        size, table = problem["page_size"], arrays["block_table"]
        lists = page_lists(table, kv_lens, size, table.device)
        wrapper = library.mla.BatchMLAPagedAttentionWrapper(workspace(table.device))
        csr = library.mla.MLAPlanMetadata.csr(
            arrays["cu_q"], lists.indptr, lists.indices, arrays["kv_lens"]
        )
        wrapper.plan(
            metadata=csr,
            num_heads=problem["heads"],
            head_dim_ckv=LATENT,
            head_dim_kpe=ROPE,
            page_size=size,
            causal=True,
            sm_scale=problem["sm_scale"],
            q_data_type=arrays["q"].dtype,
            kv_data_type=arrays["kv_cache"].dtype,
        )
        q, cache, out = arrays["q"], arrays["kv_cache"], arrays["out"]
        return lambda: wrapper.run(query=q, kv_cache=cache, out=out)

    return make
