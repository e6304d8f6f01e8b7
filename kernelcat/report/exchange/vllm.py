"""vLLM's files of Triton configurations: fused MoE in 16 bits, and products of block FP8.

vLLM reads, for a device and weights, a file that maps numbers of tokens to the constants of its
own Triton kernels. Here these are the constants of our best Triton kernel of the same tile scheme
for each number of tokens: a start for vLLM's kernels, whose time with them nobody measured.

- Fused MoE, ``E=8,N=14336,device_name=NVIDIA_H200.json``: the tile of the first product of
  ``moe_mlp/triton/grouped`` (vLLM has one tile for both products).
- Block FP8, ``N=7168,K=2048,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json``:
  ``fp8_gemm/triton/naive``, ``tma`` and ``persistent``.

Source: vLLM, ``fused_moe/configs/README`` and ``quantization/utils/fp8_utils.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from kernelcat import catalog
from kernelcat.catalog.implementation import Step
from kernelcat.errors import InvalidArgument, Unsupported
from kernelcat.jit.triton import TritonSource
from kernelcat.report.board import in_catalog
from kernelcat.report.exchange.files import Export, as_json
from kernelcat.runtime import gpu as gpus
from kernelcat.store import Measurement, decisive, newest_races
from kernelcat.store.races import microseconds

VARIANTS = {"moe_mlp": ("grouped",), "fp8_gemm": ("naive", "tma", "persistent")}
"""Entry -> variants in Triton whose tiles mean what vLLM's mean."""
_FP8_BLOCK = 128


def export(rows: Iterable[Measurement]) -> Export:
    """A file for each device and weights, from the measured races that decide calls."""
    made = Export()
    files: dict[str, dict[int, dict[str, int]]] = defaultdict(dict)
    for race in decisive(newest_races(rows)):
        key = race.key
        is_wanted = key.entry in VARIANTS and (key.kind, key.regime) == ("measured", "graph")
        if not is_wanted or not in_catalog(race):
            continue
        title = f"{race.winner.problem_name or key.problem} on {key.gpu}"
        tokens = "tokens" if key.entry == "moe_mlp" else "M"
        try:
            name, row = _file(race.winner), _best(race.rows)
            files[name][int(row.problem[tokens])] = _constants(row)
        except Unsupported as error:
            made.left_out[key.entry, title] = str(error)
    for name, configs in files.items():
        made.files[name] = as_json({str(size): configs[size] for size in sorted(configs)})
    return made


def _best(rows: Sequence[Measurement]) -> Measurement:
    """The fastest row that vLLM's constants can describe."""
    found = [row for row in rows if row.language == "triton" and row.config.get("split_k", 1) == 1
             and row.variant in VARIANTS[row.entry]]  # fmt: skip
    if not found:
        names = " or ".join(VARIANTS[rows[0].entry])
        raise Unsupported(f"triton/{names} did not race, or only with split-K")
    return min(found, key=microseconds)


def _file(row: Measurement) -> str:
    """The name of vLLM's file for the weights and the device of ``row``.

    Raises ``Unsupported`` where vLLM's kernels do not compute the problem.
    """
    problem = row.problem
    device = f"device_name={gpus.find(row.gpu).name.replace(' ', '_')}"
    if row.entry == "fp8_gemm":
        shape = f"dtype=fp8_w8a8,block_shape=[{_FP8_BLOCK},{_FP8_BLOCK}]"
        return f"block_fp8/N={problem['N']},K={problem['K']},{device},{shape}.json"
    if problem["format"] not in ("bfloat16", "float16"):
        raise Unsupported(f"vLLM's fused MoE kernel has no form for {problem['format']} weights "
                          f"with activations in {problem['act_dtype']}")  # fmt: skip
    if problem["skew"] != "uniform":
        raise Unsupported(
            f"a file has one configuration a number of tokens; skew={problem['skew']}"
        )
    return f"fused_moe/E={problem['experts']},N={problem['inter']},{device}.json"


def _constants(row: Measurement) -> dict[str, int]:
    """The constants of the first product's kernel, under vLLM's names."""
    implementation = catalog.implementation(row.entry, row.language, row.variant)
    try:
        program = implementation.program(row.to_problem(), row.to_config(), gpus.find(row.gpu))
    except (InvalidArgument, LookupError) as error:
        raise Unsupported(f"today's kernel has no such configuration: {error}") from error
    source = next(found for step in program.steps if (found := _product(step)))
    constants, options = source.constants, source.options
    depth = constants.get("BLOCK_K", _FP8_BLOCK)
    made: dict[str, Any] = {
        "BLOCK_SIZE_M": constants["BLOCK_M"],
        "BLOCK_SIZE_N": constants["BLOCK_N"],
        "BLOCK_SIZE_K": depth,
        "GROUP_SIZE_M": constants.get("GROUP_M", 1),
        "num_warps": options["num_warps"],
        "num_stages": options["num_stages"],
    }
    return {name: int(value) for name, value in made.items()}


def _product(step: Step) -> TritonSource | None:
    """The source of a step that multiplies tiles, or None."""
    source = step.source
    if isinstance(source, TritonSource) and "BLOCK_N" in source.constants:
        return source
    return None
