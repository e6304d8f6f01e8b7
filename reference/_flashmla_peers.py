"""Other people's latent attention over a paged cache, raced beside `flashmla`."""

from __future__ import annotations

import inspect
import itertools

from kernelcat.errors import MissingDependency, Unsupported
from kernelcat.reference._mla_row import LATENT, ROPE
from kernelcat.reference.paged_attn import lengths


def flash_mla():
    """DeepSeek's FlashMLA, from a build whose ``flash_mla_with_kvcache`` takes ``out``.

    The published one returns a new array; copying it would count against it. Its schedule is made
    once, as its documentation says for layers of one step.
    """
    try:
        from flash_mla import flash_mla_with_kvcache as attend
        from flash_mla import get_mla_metadata
    except ModuleNotFoundError as error:
        raise MissingDependency("the peer flash_mla needs a build of FlashMLA") from error

    def make(problem, arrays):
        batch, q_len, size = problem["batch"], problem["max_q"], problem["page_size"]
        if problem["kv_dtype"] != problem["dtype"] or size != 64:
            raise Unsupported("FlashMLA is raced over a cache of q's type, in pages of 64")
        if problem["tokens"] != batch * q_len or problem["lengths"] != "equal":
            raise Unsupported("FlashMLA has the same number of queries for every sequence")
        if "out" not in inspect.signature(attend).parameters:
            raise Unsupported("this build of FlashMLA returns new arrays")
        q = arrays["q"].view(batch, q_len, *arrays["q"].shape[1:])
        out = arrays["out"].view(batch, q_len, *arrays["out"].shape[1:])
        cache, schedule = arrays["kv_cache"].unsqueeze(2), get_mla_metadata()[0]
        table, lens, scale = arrays["block_table"], arrays["kv_lens"], problem["sm_scale"]
        return lambda: attend(
            q, cache, table, lens, LATENT, schedule, softmax_scale=scale, causal=True, out=out
        )

    return make


def flashinfer():
    """FlashInfer's MLA wrapper; what it plans on the host is done ahead of time."""
    try:
        import flashinfer
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "the peer flashinfer needs: pip install flashinfer-python"
        ) from error

    def make(problem, arrays):
        q_lens, kv_lens = lengths(problem)
        if problem["kv_dtype"] != problem["dtype"]:
            raise Unsupported("FlashInfer is raced over a cache of q's type")
        if not all(kv_lens) or not all(q_lens):
            raise Unsupported("FlashInfer is raced without empty sequences")
        size, table = problem["page_size"], arrays["block_table"]
        counts = [-(-kv_len // size) for kv_len in kv_lens]
        pages = torch.cat([table[s, :count] for s, count in enumerate(counts)])
        starts = torch.tensor(
            [0, *itertools.accumulate(counts)], dtype=torch.int32, device=table.device
        )
        memory = torch.zeros(128 << 20, dtype=torch.uint8, device=table.device)
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(memory)
        csr = flashinfer.mla.MLAPlanMetadata.csr(arrays["cu_q"], starts, pages, arrays["kv_lens"])
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
