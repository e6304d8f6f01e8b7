"""Speed of the prefill of one long prompt, as a part of a matrix product's speed.

The prefill's floating-point operations follow from the model's definition: every new token is
multiplied by the weights of its layers, of which a mixture of experts has ``num_experts_per_tok``
experts, every query by the keys that the query sees and by their values, and the last token by the
head. Norms, RoPE and activations are not counted. Latent attention counts as it is defined, not
with absorbed weights.

The matrix product is torch's of three square matrices (cuBLAS on a GPU). Both run for some seconds,
and what counts is the second half of the time, when the chip is warm.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from kernelcat.errors import KernelcatError
from kernelcat.moe.bench import prompts
from kernelcat.moe.config import Config
from kernelcat.moe.deepseek_v3 import DeepseekV3Config
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.loading import build
from kernelcat.moe.ops import on
from kernelcat.moe.weights import MetaWeights

MATRIX_SIZES = {"cuda": 8192, "cpu": 512}
"""Rows and columns of the three matrices, on each kind of device."""
NOT_IN_LAYERS = ("bias", "embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Prefill:
    """Speed of the prefill of one prompt; medians.

    Attributes
    ----------
    num_tokens : tokens of the prompt
    ms : milliseconds from the request until its first token
    tflops : 10^12 floating-point operations a second of the prefill
    matrix_size : rows and columns of the matrices
    matrix_tflops : of their product, in 16 bits on a GPU
    share : ``tflops`` as a part of ``matrix_tflops``
    """

    num_tokens: int
    ms: float
    tflops: float
    matrix_size: int
    matrix_tflops: float
    share: float


class CountedWeights(MetaWeights):
    """Counts elements of the matrices that layers multiply tokens by.

    Attributes
    ----------
    num_dense, num_experts : elements of matrices that all tokens need, and of all experts
    """

    def __init__(self) -> None:
        super().__init__("meta", torch.bfloat16)
        self.num_dense = self.num_experts = 0

    def stored(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """A tensor without memory."""
        if len(shape) == 2 and not name.endswith(NOT_IN_LAYERS):
            count = shape[0] * shape[1]
            if ".experts." in name:
                self.num_experts += count
            else:
                self.num_dense += count
        return super().stored(name, shape, dtype)

    def mxfp4(self, name: str, experts: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors without memory."""
        self.num_experts += experts * n * k
        return super().mxfp4(name, experts, n, k)


def active_elements(config: Config) -> int:
    """Elements of the matrices in all layers that one token is multiplied by."""
    weights, c = CountedWeights(), vars(config)
    build(config, weights, on("cpu"))
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    parts = [c["num_experts_per_tok"] / c[name] for name in names if name in c]
    return weights.num_dense + round(weights.num_experts * sum(parts))


def prefill_flops(config: Config, num_tokens: int) -> int:
    """Floating-point operations of the prefill of one prompt of ``num_tokens`` tokens."""
    c: Any = config
    if isinstance(config, DeepseekV3Config):
        widths = c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
    else:
        widths = 2 * c.head_dim
    model = build(config, MetaWeights("meta", torch.bfloat16), on("cpu"))
    pairs = sum(_pairs(num_tokens, layer.window) for layer in model.cache_layers)
    attention = 2 * pairs * config.num_attention_heads * widths
    head = 2 * config.vocab_size * config.hidden_size
    return 2 * num_tokens * active_elements(config) + attention + head


def _pairs(num_tokens: int, window: int) -> int:
    """Pairs of a query and a key that the query sees; ``window`` 0 for no window."""
    width = min(window or num_tokens, num_tokens)
    return width * (width + 1) // 2 + (num_tokens - width) * width


def time_prefill(engine: Engine, num_tokens: int, seconds: float = 2.0) -> Prefill:
    """Times requests that write one token, one after another, and then the matrix product.

    Each prompt is another one, so the prefix cache has none.

    Raises
    ------
    InvalidArgument
        The prompt does not fit into the engine's limits.
    """
    vocab_size = engine.limits.vocab_size
    parameters = SamplingParameters(temperature=0, max_tokens=1)
    num_runs = 0

    def run() -> float:
        nonlocal num_runs
        [prompt] = prompts(1, num_tokens, vocab_size, seed=num_runs)
        num_runs += 1
        start = time.perf_counter()
        engine.submit(prompt, parameters, needs_text=False)
        while engine.has_work:
            for output in engine.step():
                if output.error:
                    raise KernelcatError(f"a request has failed: {output.error}")
        return time.perf_counter() - start

    prefill = _median_of_second_half(run, seconds)
    device = engine.model.device
    size = MATRIX_SIZES[device.type]
    product = _median_of_second_half(_product(device, size), seconds)
    tflops = prefill_flops(engine.model.config, num_tokens) / prefill / 1e12
    matrix_tflops = 2e-12 * size**3 / product
    return Prefill(num_tokens, 1e3 * prefill, tflops, size, matrix_tflops, tflops / matrix_tflops)


def _product(device: torch.device, size: int) -> Callable[[], float]:
    """A function that runs products and returns the seconds of one."""
    is_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out, count = torch.empty_like(a), 20 if is_cuda else 1

    def run() -> float:
        start = time.perf_counter()
        for _ in range(count):
            torch.mm(a, b, out=out)
        if is_cuda:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / count

    return run


def _median_of_second_half(run: Callable[[], float], seconds: float) -> float:
    """The median of the times that ``run`` returns in the second half of ``seconds``."""
    start, times = time.perf_counter(), list[tuple[float, float]]()
    while not times or times[-1][0] < seconds:
        taken = run()
        times.append((time.perf_counter() - start, taken))
    return median(taken for end, taken in times if end >= seconds / 2)
