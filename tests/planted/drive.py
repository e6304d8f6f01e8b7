"""Tunes the planted entry, as a program of its own: a test can kill or interrupt it.

Its arguments are the devices, device 0 by default; there is a problem for each.
"""

import sys

from kernelcat.tune import Interrupted, Limits, Quiet, tune

devices = [int(word) for word in sys.argv[1:]] or [0]
try:
    tune("planted", backend="planted:Backend", problems=["small", "large"][: len(devices)],
         devices=devices, processes=2, progress=Quiet(),
         limits=Limits(candidate_s=1.5, compile_s=2.5))  # fmt: skip
except Interrupted as stopped:
    print(stopped)
    sys.exit(130)
