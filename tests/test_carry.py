"""Carrying receipts: a receipt survives changes of the source that leave the machine code alone.

Each test copies a tree, edits the copy, builds it with the installed compilers, and compares the
machine code with the record of the original tree.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from trees import Edit, Tree

from kernelcat import catalog
from kernelcat.runtime.environment import Environment
from kernelcat.runtime.gpu import find
from kernelcat.verify.receipts import Receipt, write

ENTRY = "attn_merge"
PROBLEM = "2x128-32x128"
CUDA, TRITON, CUTE = (f"kernels/{language}/attn_merge" for language in ("cuda", "triton", "cute"))
ALL = frozenset(i.name for i in catalog.implementations(ENTRY))


def named(*variants: str) -> frozenset[str]:
    return frozenset(f"{ENTRY}/{variant}" for variant in variants)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A tree with a receipt of every implementation by the installed compilers, and a record."""
    tree = Tree.copy(tmp_path_factory.mktemp("original"))
    environment = Environment.capture(find("h200")).to_json()
    receipts = [
        Receipt(name, digest, "h200", environment, (PROBLEM,), 100, {"memcheck": 0},
                "2026-11-20T00:00:00+00:00")
        for name, digest in tree.digests(ENTRY).items()
    ]  # fmt: skip
    write(tree.root / "tuning_db" / "receipts", receipts)
    assert tree.run("receipts", "record", ENTRY) == {"added": dict.fromkeys(sorted(ALL), 1),
                                                     "failed": []}  # fmt: skip
    assert not void(tree)
    return tree


def void(tree: Tree) -> frozenset[str]:
    """Names of the implementations whose receipt is not valid."""
    states = tree.run("receipts", "list", ENTRY)
    assert states.keys() == ALL
    return frozenset(name for name, state in states.items() if not state.startswith("holds"))


RENAMED = (
    Edit(f"{CUDA}/vectorized.cu", "part_lses", "sums_of_parts"),
    Edit(f"{CUDA}/part_weights.cuh", "new_max", "largest"),
    Edit(f"{TRITON}/device.py", "part_lse", "lse_of_part"),
    Edit(f"{CUTE}/vectorized.py", "rounded", "result"),
    Edit(f"{CUTE}/naive.py", "old_max", "previous_max"),
)
EXPLAINED = (
    Edit(f"{CUDA}/vectorized.cu", "// 16 bytes a thread", "// Sixteen bytes a thread"),
    Edit("kernels/cuda/include/kernelcat/types.cuh", "#pragma once", "#pragma once\n// Types."),
    Edit(f"{TRITON}/device.py", '"""Merge the parts', '"""Merge all parts'),
    Edit(
        f"{TRITON}/device.py", "    inside = row < num_rows\n", "    inside = (row < num_rows)\n\n"
    ),
    Edit(f"{CUTE}/part_weights.py", '"""e^x for a difference', '"""e^x of some difference'),
)
LEFT_TO_THE_MODEL = (
    Edit(f"{CUDA}/__init__.py", "LOAD_US = 0.7", "LOAD_US = 0.9"),
    Edit(f"{CUDA}/__init__.py", "4 * copy_us", "5 * copy_us"),
    Edit(f"{TRITON}/__init__.py", "0.3 + rows", "0.4 + rows"),
    Edit(f"{CUTE}/__init__.py", "gpu, 0.3)", "gpu, 0.2)"),
    Edit("kernelcat/catalog/cost_model.py", "LAUNCH_US = 2.0", "LAUNCH_US = 3.0"),
)
MOVED = (
    Edit(f"{CUDA}/vectorized.cu", '"part_weights.cuh"', "<kernelcat/moved.cuh>"),
    Edit(f"{CUDA}/naive.cu", '"part_weights.cuh"', "<kernelcat/moved.cuh>"),
    Edit(f"{CUTE}/naive.py", "attn_merge.part_weights", "attn_merge.moved"),
    Edit(f"{CUTE}/vectorized.py", "attn_merge.part_weights", "attn_merge.moved"),
)


def test_comments_and_cost_models_void_no_receipt(original: Tree, tmp_path: Path) -> None:
    assert not void(original.changed(tmp_path / "tree", EXPLAINED + LEFT_TO_THE_MODEL))


def test_after_renaming_variables_every_receipt_can_be_carried(
    original: Tree, tmp_path: Path
) -> None:
    tree = original.changed(tmp_path / "tree", RENAMED)
    assert void(tree) == ALL
    outcomes = tree.run("receipts", "carry")
    is_same = {outcome["implementation"]: outcome["same"] for outcome in outcomes}
    assert is_same == dict.fromkeys(ALL, True)
    assert not void(tree)
    assert all(", carried 2" in s for s in tree.run("receipts", "list", ENTRY).values())
    checked = tree.run("receipts", "verify")
    assert len(checked) == len(ALL) and all(outcome["same"] for outcome in checked)
    assert tree.run("receipts", "verify") == []


def test_moved_files_void_no_receipt(original: Tree, tmp_path: Path) -> None:
    tree = original.changed(tmp_path / "tree", MOVED)
    for before, after in (("kernels/cuda/attn_merge/part_weights.cuh",
                           "kernels/cuda/include/kernelcat/moved.cuh"),
                          (f"{CUTE}/part_weights.py", f"{CUTE}/moved.py")):  # fmt: skip
        (tree.root / before).rename(tree.root / after)
    assert not void(tree)


CHANGES = {
    "an instruction": (
        (
            Edit(f"{CUDA}/vectorized.cu", "__ldcs(", "__ldg("),
            Edit(f"{TRITON}/device.py", "rescale + weight", "rescale + weight * 2.0"),
            Edit(f"{CUTE}/vectorized.py", "weight_sum += weight", "weight_sum += weight * 2.0"),
        ),
        named("cuda/vectorized", "triton/naive", "triton/tiled", "cute/vectorized"),
    ),
    "a constant of a shared header": (
        (
            Edit(f"{CUDA}/part_weights.cuh", "weight_sum = 0.0f;", "weight_sum = 1.0f;"),
            Edit("kernels/cute/common/online_softmax.py", "LN2 = ", "LN2 = 2 * "),
        ),
        named("cuda/naive", "cuda/vectorized", "cute/naive", "cute/vectorized"),
    ),
    "a grid": (
        (
            Edit(f"{CUDA}/__init__.py", "min(ceil(_num_rows(problem) / NAIVE_WARPS)",
                 "min(1 + ceil(_num_rows(problem) / NAIVE_WARPS)"),
            Edit(f"{TRITON}/__init__.py", "(ceil(num_rows / rows), 1, 1)",
                 "(ceil(num_rows / rows) + (rows > 1), 1, 1)"),
            Edit(f"{CUTE}/naive.py", "grid=(cute.ceil_div(num_rows, WARPS), 1, 1)",
                 "grid=(cute.ceil_div(num_rows, WARPS) + 1, 1, 1)"),
        ),
        named("cuda/naive", "triton/tiled", "cute/naive"),
    ),
    "an option": (
        (
            Edit("kernelcat/jit/cuda.py", '"--ptxas-options=-v")',
                 '"--ptxas-options=-v", "--maxrregcount=24")'),
            Edit(f"{TRITON}/__init__.py", "num_warps=warps,", "num_warps=2 * warps,"),
        ),
        named("cuda/naive", "cuda/vectorized", "triton/naive", "triton/tiled"),
    ),
    "an option that no code depends on": (
        (Edit("kernelcat/jit/cuda.py", '"--ptxas-options=-v")', '"--ptxas-options=-v", "-DA=1")'),),
        named(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_voids_exactly_the_receipts_in_its_reach(
    original: Tree, tmp_path: Path, change: str
) -> None:
    edits, reached = CHANGES[change]
    tree = original.changed(tmp_path / "tree", edits)
    assert reached <= void(tree)
    outcomes = tree.run("receipts", "carry", check=False)
    assert {outcome["implementation"] for outcome in outcomes if not outcome["same"]} == reached
    assert void(tree) == reached


def test_a_compile_error_voids_the_receipt_and_is_reported(original: Tree, tmp_path: Path) -> None:
    edit = Edit(f"{CUDA}/naive.cu", "PartWeights weights;", "PartWaits weights;")
    tree = original.changed(tmp_path / "tree", [edit])
    (outcome,) = tree.run("receipts", "carry", check=False)
    assert not outcome["same"] and 'identifier "PartWaits" is undefined' in outcome["text"]
    assert void(tree) == named("cuda/naive")
