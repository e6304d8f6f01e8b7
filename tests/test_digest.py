"""Digests: the text that changes them, and the shipped table that spares computing them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from trees import Edit, Tree

from kernelcat import catalog
from kernelcat.catalog import digest, sample

IMPLEMENTATIONS = [i for name in catalog.names() for i in catalog.implementations(name)]


def test_the_shipped_table_has_the_digests_of_the_current_sources() -> None:
    shipped, now = json.loads(digest.table_path().read_text()), digest.table(IMPLEMENTATIONS)
    assert shipped == now, "run: kernelcat receipts digests"
    assert {i.name: digest.digest(i) for i in IMPLEMENTATIONS} == {
        name: value for name, (value, _) in now["digests"].items()
    }


def test_a_known_digest_imports_no_kernel_and_no_compiler() -> None:
    code = (
        "import sys; from kernelcat.catalog.digest import digest_of\n"
        "assert all(digest_of('gemm', *name) for name in (('cuda', 'wgmma'), ('cute', 'wgmma')))\n"
        "assert digest_of('gemm', 'cuda', 'none') == ''\n"
        "bad = [m for m in sys.modules if m.startswith(('triton', 'cutlass', 'torch', 'numpy'))\n"
        "       or m.startswith('kernelcat.kernels.cute')]\n"
        "sys.exit(', '.join(bad) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_sample_has_every_choice_and_depends_on_no_cost_model() -> None:
    for implementation in IMPLEMENTATIONS:
        entry = catalog.entry(implementation.entry)
        problems = sample.problems(entry)
        assert set(entry.problems.values()) <= set(problems)
        configs = {c for p in problems for c in sample.configs(implementation, p)}
        assert configs <= set(implementation.whole_space())
        assert sample.gpus(implementation)


def test_a_constant_of_a_specification_reaches_the_kernels_that_take_it(tmp_path: Path) -> None:
    original = Tree.copy(tmp_path / "original")
    entries = ("nvfp4_matmul", "nvfp4_dequantize", "tma_copy")
    before = original.digests(*entries)
    edit = Edit("reference/_fp4_tiles.py", "TILE_ROWS, TILE_COLS = 16, 64",
                "TILE_ROWS, TILE_COLS = 32, 64")  # fmt: skip
    after = original.changed(tmp_path / "changed", [edit]).digests(*entries)
    changed = {name for name, value in after.items() if value != before[name]}
    variants = ("mma", "wgmma", "stream_k", "boxes")
    assert changed == {f"nvfp4_matmul/cuda/{variant}" for variant in variants}
