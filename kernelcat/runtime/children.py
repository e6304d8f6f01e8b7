"""Child processes: every process that this package starts is started here.

A child imports nothing from the working directory, and ends with all processes that it started when
this process ends, is killed, or gives up on the child (:mod:`kernelcat.runtime.guard`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STOP_S = 5.0
"""Seconds after which a guard that does not end its command is killed."""

_HERE = Path(__file__).resolve().parent
_GUARD = (sys.executable, "-I", "-S", str(_HERE / "guard.py"))


def python(module: str, *arguments: str, executable: str | Path = sys.executable) -> list[str]:
    """The command that runs ``module`` of this package, or of ``executable``'s libraries."""
    own = module.partition(".")[0] == __name__.partition(".")[0]
    return [str(executable), "-P", str(_HERE / "child.py") if own else "-m", module, *arguments]


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """``subprocess.Popen`` of ``command`` under a guard; :func:`stop` ends both.

    Ctrl-C on the terminal does not reach the command. The command ends with the *thread* that
    called this function, if that thread ends before.
    """
    return subprocess.Popen([*_GUARD, str(os.getpid()), *command], process_group=0, **options)


def start_with_socket(module: str, **options: Any) -> tuple[subprocess.Popen[Any], socket.socket]:
    """:func:`start` of ``module``, and a socket to it: its argument is the number of its end."""
    mine, other = socket.socketpair()
    with other:
        descriptor = other.fileno()
        process = start(python(module, str(descriptor)), pass_fds=[descriptor], **options)
    return process, mine


def stop(process: subprocess.Popen[Any]) -> None:
    """End a process of :func:`start` and everything that it started, at once."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()  # the command ends with its guard
        process.wait()


def run(
    command: Sequence[str],
    *,
    input: str | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    stdout: int | None = subprocess.PIPE,
    stderr: int | None = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """The result of ``command``, with its output as text.

    Nothing of the command runs any more when this function returns or raises.

    Raises
    ------
    subprocess.TimeoutExpired
        The command took more than ``timeout`` seconds.
    """
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    with start(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, text=True,
               errors="replace") as process:  # fmt: skip
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:  # the timeout, or Ctrl-C
            stop(process)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def ending(code: int) -> str:
    """How a process with this return code ended: ``exit status 1``, ``killed by SIGSEGV``."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-code}"
