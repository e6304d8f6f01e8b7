"""What the entries that read or write a paged cache have in common on the host."""

from __future__ import annotations

from kernelcat.catalog.spec import Problem


def scales(problem: Problem) -> str:
    """``"none"``, ``"page"`` (one for each page and head) or ``"tensor"`` (one for each head)."""
    if not problem["has_scales"]:
        return "none"
    return "page" if problem["page_scales"] else "tensor"
