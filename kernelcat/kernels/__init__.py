"""The kernels, importable as ``kernelcat.kernels.LANGUAGE.ENTRY`` wherever their files lie."""

from kernelcat.paths import folders

__path__ = [str(folder) for folder in folders("kernels")]
