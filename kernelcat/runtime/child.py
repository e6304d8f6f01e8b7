"""The first file that a child process runs: ``python -P child.py MODULE ARGUMENTS...``.

Runs MODULE of this very package as ``python -m MODULE`` would, without the working directory on the
module path: a ``random.py`` there is not imported.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Import the package that holds this file, then run the module that the arguments name."""
    package = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location(
        package.name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[package.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
