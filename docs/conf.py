"""How Sphinx renders these pages as a site: ``make docs``. Every warning is an error there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kernelcat

project, author, release = "kernelcat", "the kernelcat authors", kernelcat.__version__
copyright = author
extensions = ["myst_parser"]
html_theme, html_title = "furo", f"kernelcat {release}"
myst_heading_anchors = 6  # links name headings as GitHub does
nitpicky = True


def setup(app: Any) -> None:
    """Let the link of a folder lead to its README, as on GitHub."""

    def lead_to_readme(app: Any, name: str, source: list[str]) -> None:
        here = (Path(app.srcdir) / name).parent

        def target(link: re.Match[str]) -> str:
            folder = link[1]
            return f"]({folder}README.md)" if (here / folder / "README.md").exists() else link[0]

        source[0] = re.sub(r"\]\(([\w./-]+/)\)", target, source[0])

    app.connect("source-read", lead_to_readme)
