"""Embeddings, sampling and language model heads, formulated literally."""

from __future__ import annotations

from math import exp, inf, log, log1p

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


def philox_words(key: list[int], counter: list[int]) -> list[int]:
    """Philox-4x32-10 by whole numbers, as in the paper of Salmon et al."""
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second % 2**32,
            (first >> 32) ^ counter[3] ^ key[1],
            first % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def exponential(seed: int, offset: int, token: int) -> float:
    """The number of a token in the race of exponentials."""
    key, place = ([number % 2**32, (number >> 32) % 2**32] for number in (seed, offset))
    word = philox_words(key, [token // 4, 0, *place])[token % 4]
    return -log1p(-min((word + 0.5) / 2**32, 1 - 2.0**-24))


def prefix(tokens, weights, min_p: float, top_k: int, top_p: float):
    """The tokens of ``tokens``, which are in order, that min_p, top_k and top_p leave."""
    if min_p > 0:
        tokens = [v for v in tokens if weights[v] >= min_p]
    if top_k > 0:
        tokens = tokens[:top_k]
    total, before, left = sum(weights[v] for v in tokens), 0.0, []
    for v in tokens:
        if top_p < 1 and left and before >= top_p * total:
            break
        left.append(v)
        before += weights[v]
    return left


def sample(
    problem: Problem, logits, temperature=None, seed=None, offset=None, min_p=None, top_k=None,
    top_p=None, seen=None, penalty=None,
):  # fmt: skip
    """Row by row, token by token, in Python's floats."""
    ids, logprobs = [], []
    for row in range(problem["rows"]):
        x = {v: logits[row, v] for v in range(problem["vocab"]) if logits[row, v] > -inf}
        for v in x:
            if seen is not None and int(seen[row, v // 32]) % 2**32 >> v % 32 & 1:
                x[v] = x[v] / penalty[row] if x[v] > 0 else x[v] * penalty[row]
        tokens = sorted(x, key=lambda v: (-x[v], v))
        heat = 0.0 if temperature is None else float(temperature[row])
        weights = {v: exp((float(x[v]) - float(x[tokens[0]])) / (heat or 1.0)) for v in tokens}
        token = tokens[0]
        if heat:
            filters = (0.0, 0, 1.0)
            if min_p is not None:
                filters = (float(min_p[row]), int(top_k[row]), float(top_p[row]))
            numbers = int(seed[row]), int(offset[row])
            token = max(
                prefix(tokens, weights, *filters),
                key=lambda v: log(max(weights[v], 1e-300)) - log(exponential(*numbers, v)),
            )
        ids.append(token)
        logprobs.append(log(weights[token] / sum(weights.values())))
    return {"ids": np.array(ids, np.int32), "logprobs": np.array(logprobs)}


def lm_head(problem: Problem, x, w):
    """Logit by logit; a stable sort of Python's lists keeps the lower id first."""
    rows, top_k = range(problem["tokens"]), problem["top_k"]
    logits = [[float(x[t].astype("float64") @ row.astype("float64")) for row in w] for t in rows]
    ids = [sorted(range(len(w)), key=lambda v: -logits[t][v])[:top_k] for t in rows]
    values = [[logits[t][v] for v in ids[t]] for t in rows]
    all_logits = np.array(logits, np.float32).reshape(problem["tokens"], len(w))
    dtype = problem["logits_dtype"]
    return {
        "values": np.array(values, np.float32).reshape(-1, top_k),
        "ids": np.array(ids, np.int32).reshape(-1, top_k),
        "logits": dtypes.decode(dtypes.encode(all_logits, dtype), dtype),
    }
