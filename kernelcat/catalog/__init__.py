"""What there is: entries, their implementations, and what identifies one. Plain data and text.

Here belongs what can be said of a kernel without compiling or running it: specifications, axes,
configurations, programs, cost models, discovery by file name, and digests of what runs.
"""

from kernelcat.catalog.discovery import (
    INSTALL,
    complete,
    entry,
    implementation,
    implementations,
    in_language,
    installed,
    languages,
    names,
)

__all__ = [
    "INSTALL",
    "complete",
    "entry",
    "implementation",
    "implementations",
    "in_language",
    "installed",
    "languages",
    "names",
]
