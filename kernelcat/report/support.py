"""The support matrix, entry x language x GPU: what is verified, only compiled, or missing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from kernelcat import catalog
from kernelcat.catalog.implementation import LANGUAGES, Implementation
from kernelcat.errors import MissingDependency
from kernelcat.runtime import gpu
from kernelcat.verify import receipts
from kernelcat.verify.receipts import Receipt

COLUMNS = {
    "A100": "a100",
    "L40S, RTX 4090": "l40s",
    "H100, H200": "h200",
    "B200, GB200": "b200",
    "RTX 5090": "rtx5090",
}
"""Title of a column -> a SKU of its architecture."""

STATES = ("verified", "doubted", "compiled")
_NAMES = {"cuda": "CUDA C++", "triton": "Triton", "cute": "CuTe DSL"}
_BLOCK = re.compile(r"(?P<open><!-- matrix -->)\n.*?(?P<close><!-- /matrix -->)", re.DOTALL)


def markdown() -> str:
    """The matrix as a Markdown table.

    A cell counts variants: *verified* ones have a valid receipt of the column's architecture,
    *doubted* ones have such a receipt with findings of the sanitizer, and *compiled* ones compile
    for the architecture but have no valid receipt. Entries that are work in progress are left out.

    Raises
    ------
    MissingDependency
        A language is not installed.
    """
    lines = [
        f"| entry | language | {' | '.join(COLUMNS)} |",
        f"|---|---|{'---|' * len(COLUMNS)}",
    ]
    all_receipts = receipts.read(receipts.shipped_folder())
    for name in catalog.complete():
        for language in LANGUAGES:
            variants = _variants(name, language)
            cells = [_cell(variants, sku, all_receipts) for sku in COLUMNS.values()]
            lines.append(f"| `{name}` | {_NAMES[language]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _variants(name: str, language: str) -> tuple[Implementation, ...]:
    try:
        return catalog.in_language(name, language)
    except MissingDependency as error:
        raise MissingDependency(f"the matrix needs every language: {error}") from error


def _cell(variants: Sequence[Implementation], sku: str, all_receipts: Sequence[Receipt]) -> str:
    arch = gpu.find(sku).arch
    of_arch = [r for r in all_receipts if r.gpu in gpu.SKUS and gpu.find(r.gpu).arch == arch]
    counts = Counter(_state(i, of_arch) for i in variants if i.serves(arch))
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "-"


def _state(implementation: Implementation, of_arch: Sequence[Receipt]) -> str:
    """The state of an implementation by the receipts of one architecture."""
    if not receipts.valid_for(implementation, of_arch):
        return "compiled"
    return "verified" if receipts.doubt(implementation, of_arch) is None else "doubted"


def fill(text: str) -> str:
    """``text`` with the matrix of today between ``<!-- matrix -->`` and ``<!-- /matrix -->``."""
    return _BLOCK.sub(lambda m: f"{m['open']}\n{markdown()}{m['close']}", text)
