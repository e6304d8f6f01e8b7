"""Processes that tests start: which of them run, what they started and print, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether process ``pid`` exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # there is no such file, or the process ends while it is read
        return False


def children(pid: int) -> list[int]:
    """The processes that process ``pid`` has started and that are left; none where it has ended."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def next_line(process: subprocess.Popen[str]) -> str:
    """The next line that ``process`` prints, or what it printed after its last line.

    ``readline`` would take what follows into its buffer, where ``communicate`` does not look.
    """
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(process.stdout.fileno(), 1)):
        line += byte
    return line.decode()


def hear_ctrl_c() -> None:
    """What a new process does first, as ``preexec_fn``, so that Ctrl-C interrupts it.

    A shell makes what it starts by ``&`` ignore Ctrl-C, and tests inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
