"""A program that tunes the planted entry, for tests that kill or interrupt a tune.

The arguments are device numbers, by default 0. The tune has one problem for each device.
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
