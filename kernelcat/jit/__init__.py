"""Compilers: a source and an architecture in, an artifact out, through one disk cache."""

from kernelcat.jit.artifact import Artifact
from kernelcat.jit.cache import build

__all__ = ["Artifact", "build"]
