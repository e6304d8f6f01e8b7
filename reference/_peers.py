"""Loading of peers: libraries that may be missing, and peers that have a file of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from kernelcat.catalog.spec import Peer
from kernelcat.errors import MissingDependency


@contextmanager
def required_by(peer: str, install: str) -> Iterator[None]:
    """Imports inside the ``with`` statement are what ``peer`` needs, and ``install`` provides them.

    Raises
    ------
    MissingDependency
        An import failed.
    """
    try:
        yield
    except ImportError as error:
        raise MissingDependency(f"the peer {peer} needs: {install} ({error})") from error


def import_torch(peer: str):
    """The module ``torch``, which ``peer`` needs; raises ``MissingDependency``."""
    with required_by(peer, "pip install torch"):
        return import_module("torch")


def peer_in(module: str, name: str, loader: str | None = None) -> Peer:
    """The peer that the function ``loader`` of ``kernelcat.reference.MODULE`` loads.

    The function has the peer's name unless ``loader`` names another one.

    The module is imported when the peer is raced, because it imports the entry in its turn.
    """
    return Peer(
        name, lambda: getattr(import_module(f"kernelcat.reference.{module}"), loader or name)()
    )
