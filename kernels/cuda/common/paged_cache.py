"""Sizes of problems over paged caches, and template arguments of their kernels."""

from __future__ import annotations

from kernelcat.catalog.spec import Problem


def num_rows(problem: Problem) -> int:
    """Rows of the output: query tokens times heads."""
    return int(problem["tokens"] * problem["heads"])


def context(problem: Problem) -> int:
    """Cached tokens of a sequence whose table is full."""
    return int(problem["table_width"] * problem["page_size"])


def mean_context(problem: Problem) -> float:
    """Cached tokens of a sequence on average, if all tables are full or else all pages in use."""
    return min(float(context(problem)), num_slots(problem) / max(problem["batch"], 1))


def num_slots(problem: Problem) -> int:
    """Tokens that the cache has room for."""
    return int(problem["pages"] * problem["page_size"])


def page_bits(problem: Problem) -> int:
    """log2 of the page size."""
    return int(problem["page_size"].bit_length() - 1)


def scales(problem: Problem) -> str:
    """Template argument: which keys and values share a scale."""
    if not problem["has_scales"]:
        return "kernelcat::Scales::kNone"
    return f"kernelcat::Scales::{'kPage' if problem['page_scales'] else 'kHead'}"
