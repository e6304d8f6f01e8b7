"""A rank that writes a line and nothing after it: ``RANK RANKS GPU SOCKET JOB``."""

import sys
import time

print("next: something", file=sys.stderr, flush=True)
time.sleep(60)
