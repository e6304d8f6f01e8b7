"""The kernels, importable as ``kernelcat.kernels.LANGUAGE.ENTRY`` wherever their files lie."""

from kernelcat.paths import data

__path__ = [str(data("kernels"))]
