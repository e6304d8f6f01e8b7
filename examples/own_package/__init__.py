"""A package with an entry of its own, ``squared_relu``; importing it adds the entry to the catalog.

On the command line ``KERNELCAT_ENTRIES=examples/own_package`` does the same.
"""

from pathlib import Path

from kernelcat import catalog

catalog.add_entries(Path(__file__).parent)
