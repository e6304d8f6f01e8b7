"""Tunes the planted entry, as a program of its own: a test can kill or interrupt it."""

import sys

from kernelcat.tune import Interrupted, Limits, Quiet, tune

try:
    tune("planted", backend="planted:Backend", problems=["small"], processes=2, progress=Quiet(),
         limits=Limits(candidate_s=1.5, compile_s=2.5))  # fmt: skip
except Interrupted as stopped:
    print(stopped)
    sys.exit(130)
