"""`moe_route` in CuTe DSL: right on the host, thread by thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

pytestmark = pytest.mark.slow
DEEPSEEK = {
    "score": "sigmoid", "renormalize": True, "correction": True, "groups": 8, "top_groups": 4,
    "scaling": 2.5,
}  # fmt: skip
REROUTE = {"overflow": "reroute"}
CASES = {
    "naive": ("naive", {}, (9, 20, 5), {"capacity_factor": 0.5, "load": True}),
    "naive, groups": ("naive", {}, (5, 32, 6), DEEPSEEK),
    "naive, rerouted": (
        "naive", {}, (6, 24, 4), {"capacity_factor": 1.0, "skew": "zipf", **DEEPSEEK, **REROUTE},
    ),
    "naive, rerouted product": (
        "naive", {}, (9, 12, 5),
        {
            "product": True, "hidden": 30, "router_bias": True, "capacity_factor": 1.0,
            "skew": "hot", **REROUTE,
        },
    ),
    "naive, no tokens": ("naive", {}, (0, 12, 5), {"load": True}),
}  # fmt: skip


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[str]]:
    cases = {}
    for name, (variant, config, (tokens, experts, top_k), axes) in CASES.items():
        sizes = {"tokens": tokens, "experts": experts, "top_k": top_k, "dtype": "float32"}
        cases[name] = (variant, config, {**sizes, **axes})
    script = Path(__file__).with_name("cute_route.py")
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_right_and_leaves_its_workspaces_ready(verdicts, name: str) -> None:
    assert verdicts[name] == ["", ""]
