"""Compilers: from a source and an architecture to an artifact, through one cache on disk."""

from kernelcat.jit.artifact import Artifact
from kernelcat.jit.cache import build

__all__ = ["Artifact", "build"]
