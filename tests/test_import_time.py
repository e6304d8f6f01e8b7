"""``import kernelcat`` is quick, and brings neither an array library nor a compiler."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "numpy", "cupy", "triton", "cutlass", "cuda", "sqlalchemy", "click", "rich")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def loaded(code: str) -> set[str]:
    output = python(f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))")
    return {name.partition(".")[0] for name in json.loads(output.splitlines()[-1])}


def test_importing_brings_nothing_heavy() -> None:
    assert loaded("import kernelcat").isdisjoint(HEAVY)


def test_finding_an_operator_imports_no_array_library_and_no_compiler() -> None:
    assert loaded("import kernelcat; kernelcat.get('gemm')").isdisjoint(HEAVY)


def test_explaining_needs_no_array_library() -> None:
    code = "import kernelcat; kernelcat.entries(); kernelcat.get('gemm').entry"
    assert loaded(code).isdisjoint(("torch", "cupy"))


def test_importing_takes_less_than_150_ms() -> None:
    """The best of several runs, so that other load on the machine matters little."""
    code = (
        "import time; start = time.perf_counter(); import kernelcat; "
        "print(time.perf_counter() - start)"
    )
    assert min(float(python(code)) for _ in range(5)) < 0.150


def test_listing_the_catalog_takes_less_than_400_ms(tmp_path: Path) -> None:
    """CPU time of the command, with the start of the interpreter; modules are compiled already."""
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)

    def seconds() -> float:
        before = os.times()
        command = [sys.executable, "-m", "kernelcat", "list"]
        subprocess.run(command, capture_output=True, check=True, env=env)
        after = os.times()
        children = (after.children_user, after.children_system)
        return sum(children) - before.children_user - before.children_system

    assert min(seconds() for _ in range(5)) < 0.400


def test_there_are_thirteen_public_names_at_most_and_each_is_there() -> None:
    import kernelcat

    assert len(kernelcat.__all__) <= 15
    assert all(hasattr(kernelcat, name) for name in kernelcat.__all__)
    assert dir(kernelcat) == sorted(kernelcat.__all__)
    assert not hasattr(kernelcat, "torch")


def test_the_version_is_a_version() -> None:
    import kernelcat

    assert re.match(r"\d+(\.\d+\.\d+|\+checkout)", kernelcat.__version__)
