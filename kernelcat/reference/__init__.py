"""The specifications, importable as ``kernelcat.reference.ENTRY`` wherever their files lie.

The package can be called: ``kernelcat.reference("gemm")`` is the oracle of the entry `gemm` as a
function on CPU arrays (`kernelcat.call.oracle`).
"""

import sys
from types import ModuleType

from kernelcat.paths import folders

__path__ = [str(folder) for folder in folders("reference")]


class _Package(ModuleType):
    def __call__(self, name: str) -> object:
        from kernelcat.call.oracle import reference

        return reference(name)


sys.modules[__name__].__class__ = _Package
