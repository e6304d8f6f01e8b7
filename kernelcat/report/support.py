"""Entry x language x GPU: what is verified, what was compiled and never ran, what is not there."""

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
"""Column title -> a SKU of the architecture."""

STATES = ("verified", "doubted", "compiled")
_NAMES = {"cuda": "CUDA C++", "triton": "Triton", "cute": "CuTe DSL"}
_BLOCK = re.compile(r"(?P<open><!-- matrix -->)\n.*?(?P<close><!-- /matrix -->)", re.DOTALL)


def markdown() -> str:
    """The matrix as a Markdown table.

    A cell counts the variants that a receipt of that architecture covers (*verified*), those whose
    receipt tells of findings of the sanitizer (*doubted*), and those that compile for it without
    one (*compiled*: never ran). Entries that are work in progress are left out.
    """
    lines = [
        f"| entry | language | {' | '.join(COLUMNS)} |",
        f"|---|---|{'---|' * len(COLUMNS)}",
    ]
    known = receipts.read(receipts.shipped_folder())
    for name in catalog.complete():
        for language in LANGUAGES:
            found = _variants(name, language)
            cells = [_cell(found, sku, known) for sku in COLUMNS.values()]
            lines.append(f"| `{name}` | {_NAMES[language]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _variants(name: str, language: str) -> tuple[Implementation, ...]:
    try:
        return catalog.in_language(name, language)
    except MissingDependency as error:
        raise MissingDependency(f"the matrix needs every language: {error}") from error


def _cell(found: Sequence[Implementation], sku: str, known: Sequence[Receipt]) -> str:
    arch = gpu.find(sku).arch
    serving = [i for i in found if i.serves(arch)]
    here = [r for r in known if r.gpu in gpu.SKUS and gpu.find(r.gpu).arch == arch]
    counts = Counter(_state(i, here) for i in serving)
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "-"


def _state(implementation: Implementation, here: Sequence[Receipt]) -> str:
    if not receipts.valid_for(implementation, here):
        return "compiled"
    return "verified" if receipts.doubt(implementation, here) is None else "doubted"


def fill(text: str) -> str:
    """``text`` with the block between ``<!-- matrix -->`` and ``<!-- /matrix -->`` made anew."""
    return _BLOCK.sub(lambda m: f"{m['open']}\n{markdown()}{m['close']}", text)
