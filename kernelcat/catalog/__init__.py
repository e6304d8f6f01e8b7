"""The catalog: entries, implementations of entries, and digests of implementations.

This subpackage holds what is known about a kernel without compiling or running the kernel:
specifications, axes, configurations, programs, cost models, discovery by file name, and digests.
Everything is plain data and text.
"""

from kernelcat.catalog.discovery import (
    INSTALL,
    add_entries,
    complete,
    entry,
    implementation,
    implementations,
    in_language,
    installed,
    lacks_compiler,
    languages,
    names,
)

__all__ = [
    "INSTALL",
    "add_entries",
    "complete",
    "entry",
    "implementation",
    "implementations",
    "in_language",
    "installed",
    "lacks_compiler",
    "languages",
    "names",
]
