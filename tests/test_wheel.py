"""The wheel: one importable package that contains kernels, specifications and results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_exposes_only_kernelcat(wheel: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {n for n in names if not n.endswith(".dist-info")} == {"kernelcat"}


def test_the_wheel_carries_what_the_catalog_needs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    data = "kernelcat/_data"
    assert f"{data}/reference/gemm.py" in names
    assert f"{data}/kernels/cuda/gemm/wgmma.cu" in names
    assert {"kernelcat/py.typed", "kernelcat/call/typed.pyi"} <= names
    assert any(n.startswith(f"{data}/kernels/cuda/include/kernelcat/") for n in names)
    assert any(n.startswith(f"{data}/tuning_db/") for n in names)
    assert not any("/tests/" in n or n.startswith("tests/") for n in names)


def test_the_description_on_an_index_has_no_links_that_lead_nowhere(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (each for each in files.namelist() if each.endswith(".dist-info/METADATA"))
        head, _, text = files.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    assert text.count("| `gemm` |") == 1 and "Getting started" in text
    for link in re.findall(r"\]\(([^)]*)\)", text):
        assert link.startswith("https://")
    assert "![" not in text and "<!--" not in text


def test_the_installed_package_finds_its_catalog(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-P", "-m", "kernelcat", "show", "gemm"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "cuda/wgmma" in done.stdout
    where = subprocess.run(
        [sys.executable, "-P", "-c", "import kernelcat; print(kernelcat.__file__)"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert str(tmp_path) in where.stdout
