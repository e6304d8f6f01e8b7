"""Exchange of tokens between ranks, token by token and assignment by assignment."""

from __future__ import annotations

import numpy as np

from formulations.float8 import FP8, fp8_quantize
from kernelcat import dtypes
from kernelcat.catalog.spec import Problem


def moe_dispatch(problem: Problem, x, expert_ids, weights, rows, gates, scale=None):
    """Rank by rank, each takes the tokens with one of its experts out of all ranks' lists."""
    ranks, tokens, top_k = (problem[axis] for axis in ("ranks", "tokens", "top_k"))
    local = problem["local_experts"]
    out = {
        "rows": rows.copy(), "gates": gates.copy(),
        "row_of": np.full((ranks, ranks, tokens), -1),
        "source_offsets": np.zeros((ranks, ranks + 1), int),
        "offsets": np.zeros((ranks, local + 1), int),
        "order": np.full((ranks, ranks * tokens * top_k), -1),
        "position": np.full((ranks, ranks * tokens, top_k), -1),
    }  # fmt: skip
    if scale is not None:
        out["scale"] = scale.copy()
    for rank in range(ranks):
        served: list[list[int]] = [[] for _ in range(local)]
        row = 0
        for source in range(ranks):
            for token in range(tokens):
                ids = [int(e) - rank * local for e in expert_ids[source, token]]
                if not any(0 <= expert < local for expert in ids):
                    continue
                out["row_of"][rank, source, token] = row
                out["rows"][rank, row] = x[source, token]
                if problem["act_dtype"] == FP8:
                    block = Problem.of("", M=1, K=problem["hidden"], block="1x128")
                    quantized = fp8_quantize(block, x[source, token][None])
                    out["rows"][rank, row] = quantized["q"]
                    out["scale"][rank, :, row] = quantized["scale"][:, 0]
                out["gates"][rank, row] = weights[source, token]
                for slot, expert in enumerate(ids):
                    if 0 <= expert < local:
                        served[expert].append(row * top_k + slot)
                row += 1
            out["source_offsets"][rank, source + 1] = row
        place = 0
        for expert, assignments in enumerate(served):
            for assignment in assignments:
                out["order"][rank, place] = assignment
                out["position"][rank].flat[assignment] = place
                place += 1
            out["offsets"][rank, expert + 1] = place
    return out


def moe_combine(problem: Problem, sums, row_of, expert_ids, residual=None):
    """Token by token; the ids of its experts say which ranks count."""
    shape = (problem["ranks"], problem["tokens"], problem["hidden"])
    out = np.zeros(shape, "float32") if residual is None else residual.copy()
    for owner, token in np.ndindex(shape[:2]):
        ids = expert_ids[owner, token]
        for rank in sorted({int(e) // problem["local_experts"] for e in ids if e >= 0}):
            out[owner, token] += sums[rank, row_of[rank, owner, token]]
    return {"out": dtypes.decode(dtypes.encode(out, problem["dtype"]), problem["dtype"])}


def kv_transfer(problem: Problem, source_pages, dest_ranks, dest_pages, k_cache, v_cache=None):
    """Every page of the receiver asks all lists for the one that becomes it."""
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    out = {name: cache.copy() for name, cache in caches.items() if cache is not None}
    for rank, page in np.ndindex(problem["ranks"], problem["pages"]):
        is_here = (dest_ranks == rank) & (dest_pages == page)
        for source, i in np.argwhere(is_here):
            for name, cache in out.items():
                cache[rank, page] = caches[name][source, source_pages[source, i]]
    return out
