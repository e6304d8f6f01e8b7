"""Embeddings, sampling and language model heads, formulated literally."""

from __future__ import annotations

import numpy as np

from kernelcat import dtypes
from kernelcat.catalog.spec import Problem


def embedding(problem: Problem, ids, table):
    """Token by token."""
    out = np.zeros((problem["tokens"], problem["hidden"]), np.float32)
    for t, i in enumerate(ids.tolist()):
        if 0 <= i < problem["vocab"]:
            out[t] = table[i]
    out *= np.float32(problem["scale"])
    return {"out": dtypes.decode(dtypes.encode(out, problem["dtype"]), problem["dtype"])}
