"""Files of a new entry: a specification and kernels that work, to be replaced by real ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from string import Template

from kernelcat import paths
from kernelcat.errors import InvalidArgument, Unsupported

FILES = {
    "reference": {"reference/{name}.py": "reference.py"},
    "cuda": {
        "kernels/cuda/{name}/__init__.py": "cuda.py",
        "kernels/cuda/{name}/naive.cu": "cuda.cu",
    },
    "triton": {
        "kernels/triton/{name}/__init__.py": "triton.py",
        "kernels/triton/{name}/device.py": "triton.device.py",
    },
    "cute": {
        "kernels/cute/{name}/__init__.py": "cute.py",
        "kernels/cute/{name}/naive.py": "cute.device.py",
    },
}
"""``reference`` (the specification) or a language -> {file: its template}."""


def write(
    name: str, languages: Sequence[str], summary: str, folder: Path | None = None
) -> list[Path]:
    """Write the specification of entry ``name`` and one variant in each of ``languages``.

    An existing specification stays as it is, so a language can be added later. ``folder`` is that
    of a package of one's own (``kernelcat.catalog.add_entries``); else the checkout gets the files.
    Returns the written files, relative to that folder.

    Raises
    ------
    InvalidArgument
        ``name`` is not lower-case words joined by ``_``, or a file of a language exists already.
    Unsupported
        No folder is given, and this package is installed and not a checkout.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise InvalidArgument(f"{name!r} must be lower-case words joined by _, such as rms_norm")
    root = folder or paths.data("reference").parent
    if folder is None and not (root / "pyproject.toml").is_file():
        raise Unsupported("new entries are written in a checkout, or into a --folder of your own")
    templates = {root / file.format(name=name): template
                 for part in languages for file, template in FILES[part].items()}  # fmt: skip
    for path in templates:
        if path.exists():
            raise InvalidArgument(f"{path.relative_to(root)} exists already: remove it first")
    for file, template in FILES["reference"].items():
        path = root / file.format(name=name)
        templates |= {} if path.exists() else {path: template}
    for path, template in templates.items():
        text = Path(__file__).with_name(f"{template}.template").read_text(encoding="utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(text).substitute(name=name, summary=summary), encoding="utf-8")
    return [path.relative_to(root) for path in sorted(templates)]
