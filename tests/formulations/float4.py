"""The entries in NVFP4 and MXFP4, element by element."""

from __future__ import annotations

import math

import numpy as np

from formulations.float8 import E4M3, e4m3
from formulations.products import ACTIVATIONS, product
from kernelcat import dtypes
from kernelcat.catalog.spec import Problem

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Values of the codes 0 to 7."""


def e2m1(value: float, random: int | None = None) -> int:
    """The code nearest to ``value``; the even one of two that are equally near.

    With ``random``, a number below 512, the code above ``value`` if the value's place between the
    two codes, in 512ths, plus ``random`` is at least 512; else the code below.
    """
    size, sign = min(abs(value), 6.0), 8 if math.copysign(1, value) < 0 else 0
    if random is None:
        distance = np.abs(E2M1 - size)
        nearest = np.flatnonzero(distance == distance.min())
        return sign | int(next((c for c in nearest if c % 2 == 0), nearest[0]))
    below = int(np.flatnonzero(size >= E2M1)[-1])
    if below == 7:
        return sign | 7
    fraction = (size - E2M1[below]) / (E2M1[below + 1] - E2M1[below])
    return sign | below + (round(512 * fraction) + random) // 512


def tree_sum(values):
    """Sum of float32 values (K,) by halves, padded with zeros to a power of two.

    It adds neighbours first, then sums of neighbours, as the specification does.
    """
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    rest = values[half:] if len(values) > half else np.zeros(1, "float32")
    rest = np.concatenate((rest, np.zeros(half - len(rest), "float32")))
    return tree_sum(values[:half]) + tree_sum(rest)


def hadamard(values):
    """The Hadamard transform of values (n,), n a power of two, without a factor; by halves."""
    if len(values) == 1:
        return values
    low, high = np.split(values, 2)
    low, high = hadamard(low), hadamard(high)
    return np.concatenate((low + high, low - high))


def philox_nine_bits(seed, group: int):
    """Nine random bits for each of 16 elements: the low and the high nine of each 16 bits.

    Philox-4x32-10, word by word, with the counter ``group``.
    """
    words, keys = [group & 0xFFFFFFFF, group >> 32, 0, 0], [int(word) % 2**32 for word in seed]
    for _ in range(10):
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [b >> 32 ^ words[1] ^ keys[0], b % 2**32, a >> 32 ^ words[3] ^ keys[1], a % 2**32]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return [bits for half in halves for bits in (half % 512, half // 128)]


def swizzled_index(row: int, col: int, cols: int) -> int:
    """Index of scale (row, col) in the swizzled layout of a matrix with ``cols`` scales a row."""
    tile = row // 128 * math.ceil(cols / 4) + col // 4
    return 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + col % 4


def nvfp4_quantize(problem: Problem, x, global_scale=None, weight=None, signs=None, seed=None):
    """Row by row, block by block, element by element."""
    (m, k), block = x.shape, 16 if problem["format"] == "nvfp4" else 32
    scales, codes = np.zeros((m, k // block), "float32"), np.zeros((m, k), "uint8")
    for row in range(m):
        h = transformed(problem, x[row], weight, signs)
        for j in range(k // block):
            part = slice(j * block, (j + 1) * block)
            scales[row, j], inverse = scale_of(problem, np.abs(h[part]).max(), global_scale)
            if np.isnan(scales[row, j]):
                continue
            for col, value in zip(range(k)[part], h[part] * inverse, strict=True):
                index, random = row * k + col, None
                if problem["stochastic"]:
                    random = philox_nine_bits(seed, index // 16)[index % 16]
                codes[row, col] = e2m1(float(value), random)
    if problem["scale_layout"] == "swizzled":
        # Padding is zero bytes, which E8M0 decodes to 2^-127.
        scales = swizzled(scales, padding=0.0 if problem["format"] == "nvfp4" else 2.0**-127)
    signed = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
    return {"q": signed, "scale": scales}


def transformed(problem: Problem, h, weight, signs):
    """A row h (K,) after RMSNorm and Hadamard transform, where the problem has them."""
    k = len(h)
    if problem["rms_norm"] and k:
        mean = tree_sum(h * h) / np.float32(k) + np.float32(problem["eps"])
        with np.errstate(invalid="ignore"):  # infinity times 0
            h = h * (np.float32(1) / np.sqrt(mean)) * weight
    if problem["hadamard"]:
        parts = [hadamard(part * signs) for part in h.reshape(-1, 16)]
        h = np.concatenate([*parts, np.zeros(0, "float32")]) * np.float32(0.25)
    return h


def scale_of(problem: Problem, amax, global_scale):
    """``(scale, inverse)`` of a block with the largest magnitude ``amax``; NaN for NaN."""
    one = np.float32(1)
    if np.isnan(amax):
        return amax, amax
    if problem["format"] == "nvfp4":
        exact_scale = amax * (one / (np.float32(6) * global_scale[0]))
        scale = np.float32(E4M3[e4m3(max(float(exact_scale), 2.0**-6))])
        return scale, one / (scale * global_scale[0])
    power = math.frexp(min(amax, np.finfo("float32").max))[1] - 3 if amax else -127
    scale = np.float32(2.0 ** max(power, -127))
    return scale, one / scale


def swizzled(scales, padding: float):
    """Scales (rows, cols) in the swizzled layout, with ``padding`` in between."""
    m, cols = scales.shape
    wide = np.full((math.ceil(m / 128) * 128, math.ceil(cols / 4) * 4), padding, "float32")
    for row, col in np.ndindex(scales.shape):
        wide.flat[swizzled_index(row, col, cols)] = scales[row, col]
    return wide


def nvfp4_dequantize(problem: Problem, q, scale, global_scale=None):
    """Element by element."""
    m, k = problem["M"], problem["K"]
    block = 16 if problem["format"] == "nvfp4" else 32
    x = np.zeros((m, k), "float32")
    with np.errstate(over="ignore"):
        for row, col in np.ndindex(x.shape):
            index = row * (k // block) + col // block
            if problem["scale_layout"] == "swizzled":
                index = swizzled_index(row, col // block, k // block)
            x[row, col] = np.float32(q[row, col]) * scale.flat[index]
            if global_scale is not None:
                x[row, col] *= global_scale[0]
        return {"x": dtypes.decode(dtypes.encode(x, problem["dtype"]), problem["dtype"])}


def code_index(row, col, k: int):
    """Index of the code of weight (row, col), K = ``k``, among codes in tiles of 16 x 64."""
    tile = row // 16 * math.ceil(k / 64) + col // 64
    lane, word = row % 8 * 4 + col % 8 // 2, col % 64 // 16
    nibble = row % 16 // 8 + col % 16 // 8 * 2 + col % 2 * 4
    return tile * 1024 + lane * 32 + word * 8 + nibble


def decoded_weights(problem: Problem, w, w_scale, are_scales_swizzled: bool):
    """Float32 weights (N, K), from the places of the code and of the scale of each weight."""
    n, k, block = problem["N"], problem["K"], 16 if problem["format"] == "nvfp4" else 32
    row, col = np.indices((n, k))
    code, scale = row * k + col, row * (k // block) + col // block
    if problem["packing"] == "tiles":
        row_scales = 64 // block
        tile = row // 16 * math.ceil(k / 64) + col // 64
        code = code_index(row, col, k)
        scale = (tile * 16 + row % 8 * 2 + row % 16 // 8) * row_scales + col % 64 // block
    elif are_scales_swizzled:
        scale = swizzled_index(row, col // block, k // block)
    decoded = (w.reshape(-1)[code] * w_scale.reshape(-1)[scale]).astype("float32")
    return decoded.astype("float16") if problem["dtype"] == "float16" else decoded


def nvfp4_matmul(
    problem: Problem, a, w, w_scale, global_scale=None, a_scale=None, a_block_scale=None, bias=0.0
):  # fmt: skip
    """Weight by weight, then sums of outer products in float64."""
    k, block = problem["K"], 16 if problem["format"] == "nvfp4" else 32
    decoded = decoded_weights(problem, w, w_scale, a_block_scale is not None)
    if a_block_scale is not None:
        a = a.copy()
        for row, col in np.ndindex(a.shape):
            a[row, col] *= a_block_scale.flat[swizzled_index(row, col // block, k // block)]
    z = product(a, decoded) * (1.0 if global_scale is None else float(global_scale[0]))
    if a_scale is not None:
        z *= a_scale[:, None]
    return {"d": ACTIVATIONS[problem["activation"]](z + bias)}
