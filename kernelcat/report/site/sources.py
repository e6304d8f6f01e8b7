"""What an entry consists of: its implementations, and where their sources are."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import metadata

from kernelcat import paths
from kernelcat.catalog.implementation import LANGUAGES
from kernelcat.report.ladder import height, installed
from kernelcat.report.site.markup import table, text

_LABELS = ("source", "repository")
"""Labels of the project's URL in the metadata of the installed package, in small letters."""


def sources(name: str) -> str:
    """Files of the entry ``name``, and a table of its implementations that are installed here."""
    files = [f"reference/{name}.py"]
    files += [
        f"kernels/{language}/{file}"
        for language in LANGUAGES
        for file in (name, f"{name}.py")
        if (paths.data("kernels") / language / file).exists()
    ]
    found = installed(name)
    listed = [
        (
            f"{text(language)}/{text(variant)}",
            _folding(found[language, variant].archs),
            f'<span class="wide">{text(found[language, variant].summary)}</span>',
            _folding(found[language, variant].techniques.values()),
        )
        for language, variant in sorted(found, key=lambda pair: height(found, *pair))
    ]
    headers = ("implementation", "architectures", "what it is", "instructions that prove it")
    return (
        "<h2>Sources</h2>\n"
        f"<p>Specification and oracle, then kernels: {', '.join(map(_link, files))}.</p>\n"
        + table("implementations", f"Implementations of {name}", headers, listed)
    )


def _folding(words: Iterable[str]) -> str:
    """Words in a cell that takes several lines where the screen is narrow."""
    return f'<span class="folds">{text(", ".join(words))}</span>'


def _link(path: str) -> str:
    """The name of a file, linked where the package names its project."""
    code, url = f"<code>{text(path)}</code>", project_url()
    if url is None:
        return code
    return f'<a href="{text(f"{url}/blob/HEAD/{path}")}">{code}</a>'


@cache
def project_url() -> str | None:
    """The web address of the sources in the installed package's metadata, or None without one."""
    try:
        lines = metadata.metadata("kernelcat").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return None
    for line in lines:
        label, _, url = line.partition(",")
        if label.strip().lower() in _LABELS and url.strip().startswith("https://"):
            return str(url.strip().rstrip("/"))
    return None
