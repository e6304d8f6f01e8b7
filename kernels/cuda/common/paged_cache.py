"""Template arguments of the kernels over paged caches of keys and values."""

from __future__ import annotations

from kernelcat.catalog.spec import Problem


def scales(problem: Problem) -> str:
    """Which keys and values share a scale."""
    if not problem["has_scales"]:
        return "kernelcat::Scales::kNone"
    return f"kernelcat::Scales::{'kPage' if problem['page_scales'] else 'kHead'}"
