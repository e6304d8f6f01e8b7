"""`kernelcat export`: files that FlashInfer-Bench and vLLM read."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from kernelcat import catalog
from kernelcat.cli import main
from kernelcat.errors import Unsupported
from kernelcat.report.exchange import flashinfer_bench, vllm
from kernelcat.store import shipped

SCHEMAS = json.loads((Path(__file__).parent / "schemas" / "flashinfer_bench.json").read_text())
ROWS = [row for row in shipped() if row.regime == "graph"]


def run(*words: str) -> Any:
    done = CliRunner().invoke(main, ["export", *words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "traces"
    made = run(str(folder), "--format", "flashinfer-bench", "--gpu", "h200")
    assert {Path(file) for file in made["files"]} == {p for p in folder.rglob("*") if p.is_file()}
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_file_has_the_form_of_the_schemas(traces: Path) -> None:
    checks = {
        name: jsonschema.Draft202012Validator(SCHEMAS[name]) for name in ("definition", "trace")
    }
    names = set()
    for path in traces.glob("definitions/*/*.json"):
        definition = json.loads(path.read_text())
        checks["definition"].validate(definition)
        assert (path.stem, path.parent.name) == (definition["name"], definition["op_type"])
        names.add(definition["name"])
    assert len(names) > 30
    for folder in ("workloads", "traces"):
        for path in traces.glob(f"{folder}/*/*.jsonl"):
            for line in lines(path):
                checks["trace"].validate(line)
                assert line["definition"] == path.stem and path.stem in names
                assert ("evaluation" in line) == (folder == "traces")


def test_every_trace_is_a_row_of_a_race_with_its_peers(traces: Path) -> None:
    found = [line for path in traces.glob("traces/gemm/*.jsonl") for line in lines(path)]
    times = {row.median_us for row in ROWS if row.entry == "gemm"}
    assert found and all(
        any(abs(line["evaluation"]["performance"]["latency_ms"] * 1000 - us) < 1e-9 for us in times)
        for line in found[:50]
    )
    solutions = {line["solution"].split(",")[0] for line in found}
    assert {"cublas", "kernelcat/gemm/cuda/wgmma"} <= solutions
    known = {line["workload"]["uuid"] for path in traces.glob("workloads/gemm/*.jsonl")
             for line in lines(path)}  # fmt: skip
    assert {line["workload"]["uuid"] for line in found} <= known


def small(name: str, problem: str) -> dict[str, Any]:
    """The definition of a problem, with its constant axes as they are."""
    entry = catalog.entry(name)
    return flashinfer_bench.definition_of(entry, entry.named(problem))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gemm", "M=3,N=16,K=24,activation=swiglu,bias=True"),
        ("rms_norm", "M=3,N=256,out_format=fp8,eps=1e-06"),
        ("attn_merge", "parts=3,tokens=2,heads=2,head_dim=64"),
        ("lm_head", "tokens=2,vocab=64,hidden=16,top_k=4"),
        ("fp8_swiglu", "M=2,N=512"),
    ],
)
def test_the_reference_of_a_definition_computes_its_outputs(name: str, problem: str) -> None:
    definition = small(name, problem)
    scope: dict[str, Any] = {}
    exec(definition["reference"], scope)
    sizes = {"M": 3, "tokens": 2}

    def shape(spec: dict[str, Any]) -> list[int]:
        axes = definition["axes"]
        return [axes[axis].get("value", sizes.get(axis)) for axis in spec["shape"]]

    arrays = [torch.randn(shape(spec)).to(getattr(torch, spec["dtype"]))
              for spec in definition["inputs"].values()]  # fmt: skip
    made = scope["run"](*arrays)
    made = made if isinstance(made, tuple) else (made,)
    specs = list(definition["outputs"].values())
    assert [list(each.shape) for each in made] == [shape(spec) for spec in specs]
    assert [str(each.dtype) for each in made] == [f"torch.{spec['dtype']}" for spec in specs]
    assert all(np.isfinite(each.float().numpy()).all() for each in made)


def test_the_reference_agrees_with_plain_torch() -> None:
    scope: dict[str, Any] = {}
    exec(small("gemm", "M=3,N=16,K=24")["reference"], scope)
    a, b = torch.randn(3, 24).bfloat16(), torch.randn(16, 24).bfloat16()
    torch.testing.assert_close(scope["run"](a, b), a @ b.T)


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        ("tma_copy", "tile-64MB", "src has strides of its own"),
        ("rms_norm", "qwen3-30b-8", "residual is input and output in one"),
        ("embedding", None, "which a workload cannot draw at random"),
        ("fp8_quantize", "M=256,K=256,block=128x128", "changes with M"),
    ],
)
def test_what_the_format_cannot_hold_is_left_out_with_a_reason(
    name: str, problem: str | None, reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        small(name, problem or next(iter(catalog.entry(name).problems)))


def test_an_export_says_what_it_leaves_out(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["export", str(tmp_path), "--format", "flashinfer-bench"])
    assert "left out: tma_copy: " in done.stderr and "src has strides of its own" in done.stderr
    assert len(done.stderr.splitlines()) < 60
    assert " problems, such as " in done.stderr and " 1 problems" not in done.stderr


def test_flashinfer_bench_itself_loads_what_is_written(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec("flashinfer_bench")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("needs flashinfer-bench; the schemas in tests/schemas were made by it")
    # The package imports FlashInfer when it is imported; its data classes need no CUDA.
    package = types.ModuleType("flashinfer_bench")
    package.__path__ = list(found.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "flashinfer_bench", package)
    data = importlib.import_module("flashinfer_bench.data")
    loaded = data.TraceSet.from_path(str(traces))
    assert len(loaded.definitions) > 30
    for definition in loaded.definitions.values():
        assert set(definition.var_axes) == set(definition.var_axes_bindings)
        for trace in loaded.workloads[definition.name]:
            definition.get_input_shapes(trace.workload.axes)
            definition.get_output_shapes(trace.workload.axes)
    for model in ("Definition", "Trace"):
        made = getattr(data, model).model_json_schema()
        assert set(made["properties"]) == set(SCHEMAS[model.lower()]["properties"])


KEYS = {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"}


def test_vllm_files_have_its_names_and_keys(tmp_path: Path) -> None:
    made = run(str(tmp_path), "--format", "vllm")
    names = {str(Path(file).relative_to(tmp_path)) for file in made["files"]}
    assert "fused_moe/E=128,N=768,device_name=NVIDIA_H200.json" in names
    assert ("block_fp8/N=7168,K=2048,device_name=NVIDIA_H200,dtype=fp8_w8a8,"
            "block_shape=[128,128].json") in names  # fmt: skip
    for file in made["files"]:
        configs = json.loads(Path(file).read_text())
        assert [int(size) for size in configs] == sorted(int(size) for size in configs)
        for config in configs.values():
            assert config.keys() == KEYS and min(config.values()) > 0
            assert 128 % config["BLOCK_SIZE_K"] == 0 and config["BLOCK_SIZE_M"] % 16 == 0
    assert any("no form for mxfp4" in why for why in made["left_out"].values())


def test_vllm_gets_the_fastest_triton_kernel_without_split_k() -> None:
    problem = catalog.entry("fp8_gemm").named("8192x8192x8192")
    (tile,) = {
        row.config["tile"]
        for row in [min((r for r in ROWS if r.entry == "fp8_gemm" and r.language == "triton"
                         and r.problem_key == problem.key and r.state == "sustained"
                         and r.variant != "gluon" and r.config.get("split_k", 1) == 1),
                        key=lambda r: r.median_us or 0)]
    }  # fmt: skip
    files = vllm.export(ROWS).files
    name = next(name for name in files if "N=8192,K=8192" in name)
    config = json.loads(files[name])["8192"]
    assert f"{config['BLOCK_SIZE_M']}x{config['BLOCK_SIZE_N']}" == tile
