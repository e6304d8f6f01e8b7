"""A process that runs one command, and ends the command when the parent process ends.

``python guard.py PARENT COMMAND...``, where PARENT is the process id of the parent. The command has
a process group of its own. The guard kills the group on SIGTERM and when the parent ends, even if
the parent is killed, and after the command has ended kills what the command left running. The
guard's exit status, or the signal that ends the guard, is the command's.

The standard library alone runs here: the guard starts in a hundredth of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from typing import Never

_TERM = (signal.SIGTERM,)
_PR_SET_PDEATHSIG = 1


def main() -> Never:
    """Run the command in the arguments."""
    parent, command, guard = int(sys.argv[1]), sys.argv[2:], os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _TERM)
    _die_with(parent, signal.SIGTERM)
    child = os.fork()
    if not child:
        _run(command, guard, mask)
    with contextlib.suppress(OSError):  # the child calls setpgid too: whoever is first
        os.setpgid(child, child)
    _close_streams()
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERM)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    # The command is a zombie now, so its number still names its group and no other.
    os.killpg(child, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _TERM)
    _end_like(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _run(command: list[str], guard: int, mask: set[int | signal.Signals]) -> Never:
    """Become ``command``, in a new process group."""
    os.setpgid(0, 0)
    _die_with(guard, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _die_with(parent: int, number: int) -> None:
    """On Linux, has the kernel send signal ``number`` when process ``parent`` ends.

    The parent may have ended before the kernel was told: this process then ends at once.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(1)


def _close_streams() -> None:
    """Leave standard input and output to the command alone, so that both ends see their end."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)


def _end_like(code: int) -> Never:
    """End with the exit status ``code``, or by the signal ``-code``, without a second core file."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
