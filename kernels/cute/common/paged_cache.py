"""What the entries that read or write a paged cache have in common on the host."""

from __future__ import annotations

from kernelcat.catalog.spec import Problem


def scales(problem: Problem) -> str:
    """``"none"``, ``"page"`` (one for each page and head) or ``"tensor"`` (one for each head)."""
    if not problem["has_scales"]:
        return "none"
    return "page" if problem["page_scales"] else "tensor"


def illegal_slots(problem: Problem) -> str | None:
    """Why 32-bit indices do not reach all slots of the cache, or all tokens of a sequence."""
    slots = max(problem["pages"], problem["table_width"] + 1) * problem["page_size"]
    if slots >= 1 << 31:
        return f"{slots} slots are more than 32-bit indices reach: use fewer or smaller pages"
    return None
