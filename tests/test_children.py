"""Child processes: what they import, and that nothing of them is left when they or we end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import is_running

import kernelcat
from kernelcat.errors import KernelcatError
from kernelcat.runtime import children
from kernelcat.tune.channel import Channel, ChildDied, ChildTimeout
from kernelcat.tune.messages import Hello
from kernelcat.verify import sanitizer

PACKAGE = Path(kernelcat.__file__).parent

SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
FAMILY = f"""
import subprocess, sys, time
own = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], stdout=sys.stdout)
time.sleep(600)
"""
"""A program that starts another, as Triton starts ptxas. The inner program prints its number."""


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test: modules of common names there record their import."""
    for name in ("random", "platformdirs", "numpy", "kernelcat"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\n"
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path / "imported"


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_child_imports_nothing_from_the_working_directory(trap: Path) -> None:
    done = children.run(children.python("kernelcat", "list", "--json"))
    assert done.returncode == 0 and '"gemm"' in done.stdout
    channel = Channel("kernelcat.tune.compiler", "kernelcat.tune.backend:Cuda")
    try:
        channel.request(Hello(), 60)  # the compiler answers that it has no such verb
    finally:
        channel.kill()
    assert not trap.exists(), trap.read_text()


def test_a_child_runs_the_package_of_its_parent(tmp_path: Path) -> None:
    """Also where the path of the child's Python has another package of the name."""
    (tmp_path / "kernelcat.py").write_text("")
    other = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = children.run(children.python("kernelcat", "--version"), env=other)
    assert done.returncode == 0 and kernelcat.__version__ in done.stdout, done.stderr


def test_no_module_starts_processes_without_the_helper() -> None:
    """Every call that starts a process is in ``runtime/children.py`` and ``runtime/guard.py``."""
    calls = ("subprocess.run(", "subprocess.Popen(", "subprocess.check", "os.system(", "os.exec",
             "os.fork(", "multiprocessing import", "multiprocessing.P", "get_context(",
             "ProcessPoolExecutor", "os.posix_spawn")  # fmt: skip
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("children.py", "guard.py") and "_data" not in path.parts:
            used = [call for call in calls if call in path.read_text()]
            assert not used, f"{path}: {used}"


def test_the_result_of_a_command_is_its_own() -> None:
    program = "import sys; print(sys.stdin.read()); print('e', file=sys.stderr); sys.exit(3)"
    done = children.run([sys.executable, "-c", program], input="text")
    assert (done.returncode, done.stdout, done.stderr) == (3, "text\n", "e\n")
    missing = children.run(["no-such-command"])
    assert missing.returncode == 127 and "no-such-command" in missing.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGRTMIN + 6])
def test_a_child_that_a_signal_killed_says_which(number: int) -> None:
    code = f"import os; os.kill(os.getpid(), {int(number)})"
    assert children.run([sys.executable, "-c", code]).returncode == -number
    channel = Channel("kernelcat.tune.compiler", "kernelcat.tune.backend:Cuda")
    channel.process.send_signal(number)
    expected = number.name if isinstance(number, signal.Signals) else f"signal {number}"
    with pytest.raises(ChildDied, match=f"killed by {expected}"):
        channel.request(Hello(), 60)


def test_a_real_time_signal_has_a_number() -> None:
    assert children.ending(-(signal.SIGRTMIN + 6)) == f"killed by signal {signal.SIGRTMIN + 6}"
    assert children.ending(-signal.SIGKILL) == "killed by SIGKILL"
    assert children.ending(3) == "exit status 3"


def test_a_timeout_ends_all_that_the_command_started() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        children.run([sys.executable, "-c", FAMILY], timeout=1.5)
    inner = int(caught.value.stdout)
    assert wait_until(lambda: not is_running(inner))


def test_what_a_command_leaves_running_ends_with_the_command() -> None:
    program = FAMILY.rpartition("time.sleep")[0] + "own.stdout; time.sleep(0.5)"
    done = children.run([sys.executable, "-c", program])
    assert wait_until(lambda: not is_running(int(done.stdout)))


PARENT = """
import subprocess, sys, time
from kernelcat.runtime import children
own = children.start([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(own.stdout.readline(), flush=True)
time.sleep(600)
"""


def test_the_death_of_the_parent_ends_all_that_the_command_started() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, FAMILY], stdout=subprocess.PIPE)
    inner = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert wait_until(lambda: not is_running(inner))


HASTY = """
import os, sys, threading, time
from kernelcat.tune.channel import Channel
threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), 9)).start()
channel = Channel("endless")
print(channel.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("delay_s", [0, 0.002, 0.01, 0.03, 0.1, 0.3])
def test_a_parent_that_dies_right_after_the_start_leaves_nothing(
    delay_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "endless.py").write_text(
        f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "while True: pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    subprocess.run([sys.executable, "-c", HASTY, str(delay_s)], capture_output=True, check=False)
    number = tmp_path / "pid"  # empty, if the program was killed before it had written
    if wait_until(lambda: number.exists() and number.read_text() != "", 0.7):
        assert wait_until(lambda: not is_running(int(number.read_text())))


def test_a_channel_that_times_out_ends_what_its_child_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Triton's ptxas, which the compiling process starts."""
    (tmp_path / "family.py").write_text(
        FAMILY.replace("stdout=sys.stdout", f"stdout=open({str(tmp_path / 'pid')!r}, 'w')")
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    channel = Channel("family")
    assert wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    with pytest.raises(ChildTimeout):
        channel.request(Hello(), 0.1)
    assert wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


def test_the_target_of_the_sanitizer_ends_with_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in for compute-sanitizer starts the target as a process, and waits."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift 2; done\n"$@"\nwait\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sanitizer, "SANITIZED_S", 1)
    program = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid()))\n"
    with pytest.raises(KernelcatError, match="no end after 1 s"):
        sanitizer.run("memcheck", [sys.executable, "-c", program + "while True: pass"])
    assert wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))
