"""Every entry once more, in float64 or element by element, however slow."""

from __future__ import annotations

import math

import numpy as np

from kernelcat import dtypes
from kernelcat.catalog.spec import Problem

FP8, NVFP4 = "float8_e4m3fn", "float4_e2m1fn_x2"


def product(a, b):
    """Sums of outer products over k, in float64."""
    d = np.zeros((len(a), len(b)))
    for k in range(a.shape[1]):
        d += np.outer(a[:, k].astype("float64"), b[:, k].astype("float64"))
    return d


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf, otypes=["float64"])(x / math.sqrt(2)))


def swiglu(z):
    out = np.empty((z.shape[0], z.shape[1] // 2))
    for j in range(out.shape[1]):
        out[:, j] = z[:, 2 * j] * sigmoid(z[:, 2 * j]) * z[:, 2 * j + 1]
    return out


ACTIVATIONS = {
    "none": lambda z: z,
    "silu": lambda z: z * sigmoid(z),
    "gelu": gelu,
    "swiglu": swiglu,
}


def gemm(problem: Problem, a, b, bias=0.0, residual=0.0):
    z = product(a, b) + bias
    return {"d": ACTIVATIONS[problem["activation"]](z) + residual}


def multicast_gemm(problem: Problem, a, b):
    return {"d": product(a, b)}


def fp8_gemm(problem: Problem, a, a_scale, b, b_scale):
    """Every column of A and of B scaled by its block's scale, in float64."""
    a, b = a.astype("float64"), b.astype("float64")
    for k in range(problem["K"]):
        a[:, k] *= a_scale[k // 128]
        b[:, k] *= [b_scale[row // 128, k // 128] for row in range(problem["N"])]
    return {"d": product(a, b)}


E4M3 = np.array(
    [fraction / 8 * 2.0**-6 for fraction in range(8)]
    + [(1 + fraction / 8) * 2.0 ** (power - 7) for power in range(1, 16) for fraction in range(8)]
)[:-1]
"""Values of the codes 0x00 to 0x7E."""


def e4m3(value: float) -> int:
    """The code nearest to ``value``, the even one of two."""
    size = min(abs(value), E4M3[-1])
    distance = np.abs(E4M3 - size)
    nearest = np.flatnonzero(distance == distance.min())
    code = next((c for c in nearest if c % 2 == 0), nearest[0])
    return int(code) | (0x80 if math.copysign(1, value) < 0 else 0)


def fp8_quantize(problem: Problem, x):
    """Block by block, element by element."""
    m, k, rows = problem["M"], problem["K"], 1 if problem["block"] == "1x128" else 128
    q = np.empty((m, k), "uint8")
    scale = np.empty((math.ceil(m / rows), math.ceil(k / 128)), "float32")
    for i, j in np.ndindex(scale.shape):
        at = slice(rows * i, rows * (i + 1)), slice(128 * j, 128 * (j + 1))
        amax = np.float32(max(np.abs(x[at]).max(), 1e-10))
        scale[i, j] = amax / np.float32(448)
        scaled = x[at] * (np.float32(448) / amax)
        q[at] = np.reshape([e4m3(float(value)) for value in scaled.flat], scaled.shape)
    return {
        "q": dtypes.decode(q, FP8),
        "scale": scale.T if problem["block"] == "1x128" else scale,
    }


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e2m1(value: float, chance: int | None = None) -> int:
    """The code nearest to ``value``, the even one of two; or the next one with ``chance`` / 512."""
    size, sign = min(abs(value), 6.0), 8 if math.copysign(1, value) < 0 else 0
    if chance is None:
        distance = np.abs(E2M1 - size)
        nearest = np.flatnonzero(distance == distance.min())
        return sign | int(next((c for c in nearest if c % 2 == 0), nearest[0]))
    below = int(np.flatnonzero(size >= E2M1)[-1])
    if below == 7:
        return sign | 7
    fraction = (size - E2M1[below]) / (E2M1[below + 1] - E2M1[below])
    return sign | below + (round(512 * fraction) + chance) // 512


def neighbours_sum(values):
    """Of float32 values, half by half; as if zeros filled them up to a power of two."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    rest = values[half:] if len(values) > half else np.zeros(1, "float32")
    rest = np.concatenate((rest, np.zeros(half - len(rest), "float32")))
    return neighbours_sum(values[:half]) + neighbours_sum(rest)


def transform(values):
    """Hadamard's, half by half."""
    if len(values) == 1:
        return values
    low, high = np.split(values, 2)
    low, high = transform(low), transform(high)
    return np.concatenate((low + high, low - high))


def philox_chances(seed, place: int):
    """Sixteen times nine bits, the low and the high ones of 16: Philox-4x32-10 word by word."""
    words, keys = [place & 0xFFFFFFFF, place >> 32, 0, 0], [int(word) % 2**32 for word in seed]
    for _ in range(10):
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [b >> 32 ^ words[1] ^ keys[0], b % 2**32, a >> 32 ^ words[3] ^ keys[1], a % 2**32]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return [chance for half in halves for chance in (half % 512, half // 128)]


def swizzled_place(row: int, col: int, cols: int) -> int:
    """Where a scale lies among bytes; ``cols`` are those of a row."""
    tile = row // 128 * math.ceil(cols / 4) + col // 4
    return 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + col % 4


def nvfp4_quantize(problem: Problem, x, global_scale=None, weight=None, signs=None, seed=None):
    """Row by row, block by block, element by element."""
    (m, k), is_nvfp4, one = x.shape, problem["format"] == "nvfp4", np.float32(1)
    size = 16 if is_nvfp4 else 32
    scales, codes = np.zeros((m, k // size), "float32"), np.zeros((m, k), "uint8")
    for row in range(m):
        h = x[row]
        if problem["rms_norm"] and k:
            mean = neighbours_sum(h * h) / np.float32(k) + np.float32(problem["eps"])
            with np.errstate(invalid="ignore"):  # infinity times 0
                h = h * (one / np.sqrt(mean)) * weight
        if problem["hadamard"]:
            parts = [transform(part * signs) for part in h.reshape(-1, 16)]
            h = np.concatenate([*parts, np.zeros(0, "float32")]) * np.float32(0.25)
        for block in range(k // size):
            values = h[block * size : (block + 1) * size]
            amax = np.abs(values).max()
            if np.isnan(amax):
                scales[row, block] = np.nan
                continue
            if is_nvfp4:
                wanted = amax * (one / (np.float32(6) * global_scale[0]))
                scale = np.float32(E4M3[e4m3(max(float(wanted), 2.0**-6))])
                inverse = one / (scale * global_scale[0])
            else:
                power = math.frexp(min(amax, np.finfo("float32").max))[1] - 3 if amax else -127
                scale = np.float32(2.0 ** max(power, -127))
                inverse = one / scale
            scales[row, block] = scale
            for i, value in enumerate(values * inverse):
                chance, at = None, row * k + block * size + i
                if problem["stochastic"]:
                    chance = philox_chances(seed, at // 16)[at % 16]
                codes[row, block * size + i] = e2m1(float(value), chance)
    if problem["scale_layout"] == "swizzled":
        padded = np.zeros((math.ceil(m / 128) * 128, math.ceil(k / size / 4) * 4), "float32")
        if not is_nvfp4:
            padded += np.float32(2.0**-127)
        for row, col in np.ndindex(scales.shape):
            padded.flat[swizzled_place(row, col, k // size)] = scales[row, col]
        scales = padded
    signed = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
    return {"q": signed, "scale": scales}


def weight_place(row: int, col: int, k: int) -> int:
    """Where the code of (row, col) lies among those of weights in tiles of 16 x 64."""
    tile = row // 16 * math.ceil(k / 64) + col // 64
    lane, step = row % 8 * 4 + col % 8 // 2, col % 64 // 16
    nibble = row % 16 // 8 + col % 16 // 8 * 2 + col % 2 * 4
    return tile * 1024 + lane * 32 + step * 8 + nibble


def nvfp4_matmul(
    problem: Problem, a, w, w_scale, global_scale=None, a_scale=None, a_block_scale=None, bias=0.0
):  # fmt: skip
    """Weight by weight, then sums of outer products, in float64."""
    n, k, dtype = problem["N"], problem["K"], problem["dtype"]
    size = 16 if problem["format"] == "nvfp4" else 32
    decoded = np.zeros((n, k), "float32")
    for row, col in np.ndindex(decoded.shape):
        at, block = row * k + col, row * (k // size) + col // size
        if problem["packing"] == "tiles":
            each = 64 // size
            tile = row // 16 * math.ceil(k / 64) + col // 64
            at = weight_place(row, col, k)
            block = (tile * 16 + row % 8 * 2 + row % 16 // 8) * each + col % 64 // size
        elif a_block_scale is not None:
            block = swizzled_place(row, col // size, k // size)
        decoded[row, col] = w.flat[at] * w_scale.flat[block]
    if dtype == "float16":
        decoded = decoded.astype("float16")
    if a_block_scale is not None:
        a = a.copy()
        for row, col in np.ndindex(a.shape):
            a[row, col] *= a_block_scale.flat[swizzled_place(row, col // size, k // size)]
    z = product(a, decoded) * (1.0 if global_scale is None else float(global_scale[0]))
    if a_scale is not None:
        z *= a_scale[:, None]
    return {"d": ACTIVATIONS[problem["activation"]](z + bias)}


def nvfp4_dequantize(problem: Problem, q, scale, global_scale=None):
    """Element by element."""
    m, k = problem["M"], problem["K"]
    size = 16 if problem["format"] == "nvfp4" else 32
    x = np.zeros((m, k), "float32")
    for row, col in np.ndindex(x.shape):
        place = row * (k // size) + col // size
        if problem["scale_layout"] == "swizzled":
            place = swizzled_place(row, col // size, k // size)
        x[row, col] = np.float32(q[row, col]) * scale.flat[place]
        if global_scale is not None:
            x[row, col] *= global_scale[0]
    with np.errstate(over="ignore"):
        return {"x": dtypes.decode(dtypes.encode(x, problem["dtype"]), problem["dtype"])}


def fp8_swiglu(problem: Problem, x):
    """Block by block, in float64."""
    y = swiglu(x.astype("float64"))
    q = np.empty(y.shape, "uint8")
    scale = np.empty((math.ceil(y.shape[1] / 128), problem["M"]))
    for block, row in np.ndindex(scale.shape):
        at = row, slice(128 * block, 128 * (block + 1))
        amax = max(np.abs(y[at]).max(), 1e-10)
        scale[block, row] = amax / 448
        q[at] = [e4m3(value) for value in y[at] * 448 / amax]
    return {"q": dtypes.decode(q, FP8), "scale": scale}


def tma_copy(problem: Problem, src):
    """Element by element."""
    out = np.empty((problem["rows"], problem["cols"]), src.dtype)
    for row in range(problem["rows"]):
        for col in range(problem["cols"]):
            out[row, col] = src[row, col]
    return {"dst": out}


def attn_merge(problem: Problem, outs, lses):
    """Row by row, in float64; parts that saw no key are left out."""
    out, lse = np.zeros(outs.shape[1:]), np.full(lses.shape[1:], -np.inf)
    for row in np.ndindex(*lse.shape):
        seen = [part for part in range(problem["parts"]) if lses[part][row] > -np.inf]
        if seen:
            lse[row] = np.logaddexp.reduce([float(lses[part][row]) for part in seen])
            for part in seen:
                out[row] += math.exp(lses[part][row] - lse[row]) * outs[part][row].astype(float)
    return {"out": out, "lse": lse}


def paged_attn(problem: Problem, q, k_cache, v_cache, block_table, kv_lens, cu_q, **more):
    """Query by query and key by key, in float64; lengths are those of the arrays."""
    group, size = problem["heads"] // problem["kv_heads"], problem["page_size"]
    scale = problem["sm_scale"] or 1 / math.sqrt(problem["head_dim"])
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for s in range(problem["batch"]):
        for t, head in np.ndindex(cu_q[s + 1] - cu_q[s], problem["heads"]):
            own = kv_lens[s] - (cu_q[s + 1] - cu_q[s]) + t
            first = max(0, own - problem["window"] + 1) if problem["window"] else 0
            logits, values = [], [np.zeros(problem["head_dim"])]
            for token in range(first, own + 1):
                page = block_table[s, token // size]
                at = page, token % size, head // group
                k, v = k_cache[at].astype("float64"), v_cache[at].astype("float64")
                if problem["kv_dtype"] == NVFP4:
                    block = np.arange(problem["head_dim"]) // 16
                    k *= more["k_block_scale"][at][block]
                    v *= more["v_block_scale"][at][block]
                if problem["has_scales"]:
                    row = page if problem["page_scales"] else 0, head // group
                    k, v = k * more["k_scale"][row], v * more["v_scale"][row]
                logit = scale * (q[cu_q[s] + t, head] @ k)
                if problem["softcap"]:
                    logit = problem["softcap"] * math.tanh(logit / problem["softcap"])
                logits.append(logit)
                values.append(v)
            sink = more["sinks"][head] if problem["has_sinks"] else -math.inf
            total = np.logaddexp.reduce([sink, *logits])
            if total > -math.inf:
                weights = np.exp(np.array([-math.inf, *logits]) - total)
                out[cu_q[s] + t, head], lse[cu_q[s] + t, head] = weights @ values, total
    return {"out": out, "lse": lse}


def kv_write(problem: Problem, q, k, v, block_table, kv_lens, cu_q, cos_sin, **more):
    """Token by token and pair by pair, as products of complex numbers; the rest stays."""
    half, size = problem["rotary_dim"] // 2, problem["page_size"]
    out = {"q_out": q.astype(float), **{n: more[n].astype(float) for n in ("k_cache", "v_cache")}}

    def turn(row, at):
        row = row.astype(float)
        for i in range(half):
            pair = [2 * i, 2 * i + 1] if problem["style"] == "interleaved" else [i, i + half]
            turned = complex(*row[pair]) * complex(cos_sin[at, i], cos_sin[at, half + i])
            row[pair] = turned.real, turned.imag
        return row

    for s in range(problem["batch"]):
        for t in range(cu_q[s], cu_q[s + 1]):
            at = kv_lens[s] - cu_q[s + 1] + t
            page = block_table[s, at // size]
            for head in range(problem["heads"]):
                out["q_out"][t, head] = turn(q[t, head], at)
            for head in range(problem["kv_heads"]):
                for name, row in (("k", turn(k[t, head], at)), ("v", v[t, head])):
                    if problem["has_scales"]:
                        row = row / more[f"{name}_scale"][page * problem["page_scales"], head]
                    if problem["kv_dtype"] == FP8:
                        row = np.minimum(np.maximum(row, -448), 448)
                    out[f"{name}_cache"][page, at % size, head] = row
    return out


def latent_row(packed):
    """512 values of a float8 code and a scale each, then 64 of bfloat16, from 656 bytes."""
    codes, scales, turned = packed[:512], packed[512:528].tobytes(), packed[528:].tobytes()
    values = [math.copysign(E4M3[code & 0x7F], 127.5 - code) for code in codes]
    scales = np.frombuffer(scales, "<f4").astype("float64")
    halves = np.frombuffer(turned, "<u2").astype("<u4") << 16
    return np.concatenate((np.repeat(scales, 128) * values, halves.view("<f4")))


def flashmla(problem: Problem, q, kv_cache, block_table, kv_lens, cu_q):
    """Query by query and head by head, in float64; lengths are those of the arrays."""
    size, scale = problem["page_size"], problem["sm_scale"]
    out, lse = np.zeros((*q.shape[:2], 512)), np.full(q.shape[:2], -np.inf)
    for s in range(problem["batch"]):
        rows = np.zeros((kv_lens[s], 576))
        for token in range(kv_lens[s]):
            row = kv_cache[block_table[s, token // size], token % size]
            is_packed = problem["kv_dtype"] == "uint8"
            rows[token] = latent_row(row.astype("uint8")) if is_packed else row
        for t, head in np.ndindex(cu_q[s + 1] - cu_q[s], problem["heads"]):
            seen = rows[: kv_lens[s] - (cu_q[s + 1] - cu_q[s]) + t + 1]
            logits = scale * (seen @ q[cu_q[s] + t, head].astype("float64"))
            total = np.logaddexp.reduce(logits)
            out[cu_q[s] + t, head] = np.exp(logits - total) @ seen[:, :512]
            lse[cu_q[s] + t, head] = total
    return {"out": out, "lse": lse}


def packed_row(row):
    """656 bytes of a row: group by group, element by element."""
    codes, scales = [], []
    for group in row[:512].reshape(4, 128).astype("float64"):
        scales.append(2.0 ** math.ceil(math.log2(max(np.abs(group).max() / 448, 1e-4))))
        codes += [e4m3(value / scales[-1]) for value in group]
    halves = dtypes.encode(row[512:], "bfloat16")
    parts = np.uint8(codes), np.float32(scales).view("uint8"), halves.view("uint8")
    return np.concatenate(parts)


def mla_kv_write(problem: Problem, c, k_pe, block_table, kv_lens, cu_q, cos_sin, kv_cache):
    """Token by token and pair by pair, in float32 since bytes count; the rest stays."""
    half, size, out = problem["rotary_dim"] // 2, problem["page_size"], kv_cache.copy()
    for s in range(problem["batch"]):
        for t in range(cu_q[s], cu_q[s + 1]):
            at, turned = kv_lens[s] - cu_q[s + 1] + t, k_pe[t].copy()
            for i in range(half):
                pair = [2 * i, 2 * i + 1] if problem["style"] == "interleaved" else [i, i + half]
                (x, y), cos, sin = k_pe[t, pair], cos_sin[at, i], cos_sin[at, half + i]
                turned[pair] = x * cos - y * sin, y * cos + x * sin
            row = np.concatenate((c[t], turned))
            is_packed = problem["kv_dtype"] == "uint8"
            page = block_table[s, at // size]
            out[page, at % size] = packed_row(row) if is_packed else row
    return {"kv_cache": out}


INDEPENDENT = {
    "attn_merge": attn_merge,
    "flashmla": flashmla,
    "fp8_gemm": fp8_gemm,
    "fp8_quantize": fp8_quantize,
    "fp8_swiglu": fp8_swiglu,
    "gemm": gemm,
    "kv_write": kv_write,
    "mla_kv_write": mla_kv_write,
    "multicast_gemm": multicast_gemm,
    "nvfp4_dequantize": nvfp4_dequantize,
    "nvfp4_matmul": nvfp4_matmul,
    "nvfp4_quantize": nvfp4_quantize,
    "paged_attn": paged_attn,
    "tma_copy": tma_copy,
}
