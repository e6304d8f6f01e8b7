"""The commit of this checkout, whose hash is the seed of random problems."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kernelcat import paths
from kernelcat.errors import InvalidArgument
from kernelcat.runtime import children

SOURCES = ("kernelcat", "kernels", "reference", "tuning_db/*.jsonl")
"""Paths that decide which kernels a program gets, and what they compute."""
TIMEOUT_S = 30.0


def commit() -> str:
    """The hash of the commit that is checked out: 40 hex digits.

    Raises
    ------
    InvalidArgument
        This is no checkout of git, or the sources differ from the commit.
    """
    root = _git("rev-parse", "--show-toplevel").strip()
    if not Path(root).samefile(_root()):
        raise InvalidArgument(f"{_root()} is no checkout of git: give --seed")
    changed = _git("status", "--porcelain", "--", *SOURCES)
    if changed:
        raise InvalidArgument(
            f"{changed.splitlines()[0][3:]} differs from the commit: commit it, or give --seed"
        )
    return _git("rev-parse", "HEAD").strip()


def _root() -> Path:
    return paths.data("kernels").parent


def _git(*arguments: str) -> str:
    """The output of git in the folder of this checkout; ``InvalidArgument`` where git fails."""
    try:
        done = children.run(["git", "-C", str(_root()), *arguments], timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidArgument(f"git does not run ({error}): give --seed") from error
    if done.returncode:
        reason = " ".join((done.stderr or "").split()) or children.ending(done.returncode)
        raise InvalidArgument(f"there is no commit to take a seed from ({reason}): give --seed")
    return done.stdout
