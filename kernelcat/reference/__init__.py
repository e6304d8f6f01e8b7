"""The specifications, importable as ``kernelcat.reference.ENTRY`` wherever their files lie."""

from kernelcat.paths import data

__path__ = [str(data("reference"))]
