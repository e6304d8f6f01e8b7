"""FlashInfer-Bench's data sets: definitions, workloads and traces of this catalog's results.

A *definition* there has fixed element types and constant sizes, and few variable axes, which the
inputs' shapes must give: here the first of ``tokens``, ``M`` and ``rows``. So an entry becomes a
definition for each combination of choices and weights' sizes. Its reference calls the oracle. A
*workload* gives the variable axis and draws all inputs at random, so that entries with indices
among their inputs are left out: random indices lead out of their arrays. A *trace* is a row of a
race, in device time.

Source: https://bench.flashinfer.ai/docs, "FlashInfer Trace"; tests load what is written by that
project's own package.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from kernelcat import catalog
from kernelcat.call.documentation import keywords
from kernelcat.catalog.spec import Derived, Entry, Problem, Tensor
from kernelcat.errors import Unsupported
from kernelcat.report.board import in_catalog
from kernelcat.report.exchange.files import Export, as_json, as_lines
from kernelcat.store import Measurement, Race, decisive, newest_races

ELEMENT_TYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")
"""Element types that have one form in both projects and that a workload may draw at random."""
VARIABLE = ("tokens", "M", "rows")
"""Axes of which the first that an entry has is variable; other sizes are constants."""
_OTHER_SIZE = 384
"""Another value of the variable axis: a size that changes with it cannot be a constant."""


def export(rows: Iterable[Measurement]) -> Export:
    """Definitions of all named problems, and workloads and traces of the races in ``rows``.

    Only device time (regime ``graph``) of measured races that decide calls is exported.
    """
    made = Export()
    races: dict[str, list[Race]] = defaultdict(list)
    for race in decisive(newest_races(rows)):
        if race.key.kind == "measured" and race.key.regime == "graph" and in_catalog(race):
            races[race.key.entry].append(race)
    for name in catalog.names():
        _add(made, catalog.entry(name), races[name])
    return made


def _add(made: Export, entry: Entry, races: Sequence[Race]) -> None:
    definitions: dict[str, dict[str, Any]] = {}
    problems: dict[Problem, str] = {}
    raced = (race.winner.to_problem() for race in races)
    for problem in dict.fromkeys((*entry.problems.values(), *raced)):
        try:
            definition = definition_of(entry, problem)
        except Unsupported as error:
            title = entry.problem_name(problem) or str(problem)
            made.left_out[entry.name, title] = str(error)
            continue
        definitions[definition["name"]] = definition
        problems[problem] = definition["name"]
    traces: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for race in races:
        problem = race.winner.to_problem()
        if problem in problems:
            name = problems[problem]
            traces[name] += [_trace(name, entry, problem, row) for row in race.measurements]
    for name, definition in definitions.items():
        folder = f"{entry.name}/{name}"
        made.files[f"definitions/{folder}.json"] = as_json(definition)
        made.files[f"workloads/{folder}.jsonl"] = as_lines(
            {"definition": name, "workload": _workload(entry, problem)}
            for problem, owner in problems.items()
            if owner == name
        )
        if traces[name]:
            made.files[f"traces/{folder}.jsonl"] = as_lines(traces[name])


def definition_of(entry: Entry, problem: Problem) -> dict[str, Any]:
    """The definition to which ``problem`` belongs; raises ``Unsupported`` where there is none."""
    variable, axes = _variable(entry), dict[str, Any]()
    specs: dict[str, dict[str, Any]] = {"inputs": {}, "outputs": {}}
    for side, tensors in (("inputs", entry.inputs), ("outputs", entry.outputs)):
        for tensor in tensors:
            if tensor.present(problem):
                _check(tensor, problem)
                shape = [_axis(axes, variable, size, problem) for size in tensor.shape]
                specs[side][tensor.name] = {
                    "shape": shape, "dtype": tensor.dtype_of(problem), "description": tensor.doc
                }  # fmt: skip
    told = {name for spec in specs["inputs"].values() for name in spec["shape"]}
    for name, axis in axes.items():
        if axis["type"] == "var" and name not in told:
            raise Unsupported(f"the size {name} of an output is not among the sizes of the inputs")
    return {
        "name": _name(entry, problem, axes),
        "op_type": entry.name,
        "description": entry.summary,
        "tags": ["kernelcat"],
        "axes": axes,
        **specs,
        "reference": _reference(entry, problem, list(specs["inputs"])),
    }


def _variable(entry: Entry) -> str:
    found = [name for name in VARIABLE if name in entry.axis_names]
    if not found:
        raise Unsupported(f"none of the axes {', '.join(VARIABLE)} is there")
    return found[0]


def _check(tensor: Tensor, problem: Problem) -> None:
    """Raise ``Unsupported`` for a tensor that a definition cannot describe."""
    dtype = tensor.dtype_of(problem)
    is_index = dtype == "int32" and tensor in catalog.entry(problem.entry).outputs
    if dtype not in ELEMENT_TYPES and not is_index:
        raise Unsupported(f"{tensor.name} is {dtype}, which a workload cannot draw at random")
    if tensor.updated:
        raise Unsupported(f"{tensor.name} is input and output in one")
    if tensor.strides is not None:
        raise Unsupported(f"{tensor.name} has strides of its own")


def _axis(axes: dict[str, Any], variable: str, size: str | int | Derived, problem: Problem) -> str:
    """The name of the axis of one size of a shape, which is put into ``axes``."""
    if isinstance(size, int):
        name, value, is_variable = f"n{size}", size, False
    elif isinstance(size, str):
        name, value, is_variable = size, int(problem[size]), size == variable
    else:
        name = re.sub(r"\W+", "_", str(size)).strip("_")
        value = int(size.of(problem.values))
        is_variable = value != size.of({**problem.values, variable: int(problem[variable]) +
                                        _OTHER_SIZE})  # fmt: skip
        if is_variable:
            raise Unsupported(f"the size {size} changes with {variable}")
    axes[name] = {"type": "var"} if is_variable else {"type": "const", "value": value}
    return name


def _name(entry: Entry, problem: Problem, axes: dict[str, Any]) -> str:
    """``gemm_bfloat16_N7168_K2048``: choices that are not the default, then constant sizes."""
    parts = [entry.name]
    for axis in entry.axes:
        value = problem[axis.name]
        if axis.values and value != axis.default:
            is_plain = isinstance(value, str) and axis.default is None
            parts.append(str(value) if is_plain else f"{axis.name}_{value}")
        elif not axis.values and axis.name != _variable(entry):
            parts.append(f"{axis.name}{value}")
    return re.sub(r"[^\w.-]", "_", "_".join(parts))


def _reference(entry: Entry, problem: Problem, inputs: Sequence[str]) -> str:
    """The source of a function that computes the definition by the oracle, on the CPU."""
    given = "".join(f", {axis.name}={problem[axis.name]!r}" for axis in keywords(entry))
    optional = {tensor.name for tensor in entry.inputs if tensor.flag is not None}
    passed = ", ".join(f"{name}={name}.cpu()" if name in optional else f"{name}.cpu()"
                       for name in inputs)  # fmt: skip
    return (
        "import kernelcat\n\n\n"
        f"def run({', '.join(inputs)}):\n"
        f"    made = kernelcat.reference({entry.name!r})({passed}{given})\n"
        "    if not isinstance(made, tuple):\n"
        f"        return made.to({inputs[0]}.device)\n"
        f"    return tuple(each.to({inputs[0]}.device) for each in made if each is not None)\n"
    )


def _workload(entry: Entry, problem: Problem) -> dict[str, Any]:
    variable = _variable(entry)
    names = [tensor.name for tensor in entry.inputs if tensor.present(problem)]
    return {
        "axes": {variable: int(problem[variable])},
        "inputs": {name: {"type": "random"} for name in names},
        "uuid": str(uuid5(NAMESPACE_URL, f"kernelcat:{entry.name}:{problem.key}")),
    }


def _trace(definition: str, entry: Entry, problem: Problem, row: Measurement) -> dict[str, Any]:
    """A row of a race. The oracle is not timed, so that the reference has no time."""
    assert row.median_us is not None, "only passed rows race"
    compilers = row.environment.get("compilers", {})
    return {
        "definition": definition,
        "workload": _workload(entry, problem),
        "solution": _solution(row),
        "evaluation": {
            "status": "PASSED",
            "environment": {
                "hardware": str(row.environment.get("name", row.gpu)).replace(" ", "_"),
                "libs": {str(name): str(version) for name, version in compilers.items()},
            },
            "timestamp": row.created_at,
            "log": f"run {row.run}, {row.state}, cold L2, interval {row.ci_us} us",
            "correctness": {"max_absolute_error": row.max_error or 0.0},
            "performance": {"latency_ms": row.median_us / 1000},
        },
    }


def _solution(row: Measurement) -> str:
    """``kernelcat/gemm/cuda/wgmma,split_k=1``, or the name of a peer."""
    if row.is_peer:
        return row.variant
    config = "".join(f",{key}={value}" for key, value in sorted(row.config.items()))
    return f"kernelcat/{row.entry}/{row.language}/{row.variant}{config}"
