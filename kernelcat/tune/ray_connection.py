"""The connection of this process to a running Ray cluster."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from kernelcat.errors import InvalidArgument, MissingDependency

ANSWER_S = 5.0
"""Seconds in which the port of a cluster must accept a connection."""
MAX_TRIES = 4
RETRY_S = 1.0
"""How often to ask a cluster that has just started, and seconds in between."""


def shutdown() -> None:
    """Ends the connection of this process."""
    import ray

    ray.shutdown()


def connect(address: str | None) -> bool:
    """Connects this process to a running cluster; False if it was connected before.

    Raises
    ------
    MissingDependency
        Ray is not installed, or no cluster answers within :data:`ANSWER_S` seconds.
    InvalidArgument
        The address is none of a cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependency("the executor ray needs: pip install 'kernelcat[ray]'") from error
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    probe(address)
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            ray.init(address, log_to_driver=False, configure_logging=False)
            return True
        except (ConnectionError, RuntimeError) as error:
            # A cluster that has just started accepts connections before it answers.
            if not tries_left or not isinstance(error, ConnectionError):
                said = " ".join(str(error).split())
                raise MissingDependency(f"cannot use the Ray cluster {address}: {said}") from error
            time.sleep(RETRY_S)
    raise AssertionError


def probe(address: str) -> None:
    """Opens a connection to a cluster, because ``ray.init`` waits minutes for a closed port.

    ``auto`` is the cluster that ``ray start`` has noted in its folder; without a note, ``ray.init``
    looks for a process. Raises as :func:`connect`.
    """
    named = address
    if address == "auto":
        folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        note = Path(folder) / "ray" / "ray_current_cluster"
        named = note.read_text().strip() if note.exists() else ""
        if not named:
            return
    parts = urlsplit(named if "//" in named else f"//{named}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme or not host or not port:
        raise InvalidArgument(f"--address {address} is no running cluster: write HOST:6379 or "
                              "auto, on a machine of the cluster")  # fmt: skip
    deadline = time.monotonic() + ANSWER_S
    while True:
        try:
            with socket.create_connection((host, port), timeout=ANSWER_S):
                return
        except OSError as error:
            if time.monotonic() > deadline or isinstance(error, socket.gaierror):
                why = error.strerror or str(error)
                raise MissingDependency(
                    f"no Ray cluster answers at {named} ({why}): start one with ray start --head, "
                    "or name another with --address"
                ) from error
            time.sleep(RETRY_S / 2)
