"""The operators of a process by name and pin, and what makes all of them choose anew."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from kernelcat import catalog
from kernelcat.call import evidence
from kernelcat.call.choice import Pin
from kernelcat.call.operator import Op, register_with_torch
from kernelcat.catalog.implementation import Config, ConfigValue
from kernelcat.errors import InvalidArgument, short
from kernelcat.importing import LOCK
from kernelcat.verify import code_record, receipts

_ops: dict[tuple[str, Pin], Op] = {}  # read and changed by holders of LOCK


def entries() -> tuple[str, ...]:
    """The names of all entries, sorted: what :func:`get` takes."""
    return catalog.names()


def get(
    name: str,
    *,
    language: str | None = None,
    variant: str | None = None,
    config: Mapping[str, ConfigValue] | None = None,
) -> Op:
    """The operator called ``name``; imports no kernel yet.

    Parameters
    ----------
    language, variant, config
        Pin a language (``cuda``, ``triton``, ``cute``), a variant in that language, and a
        configuration of that variant. By default measurements decide.

    Raises
    ------
    UnknownName
        There is no such entry, language or variant; the message lists the nearest names.
    InvalidArgument
        A variant without a language, a configuration without a variant, or a configuration with
        other parameters than the variant's.
    MissingDependency
        The compiler of the pinned language is not installed.
    """
    entry = catalog.entry(name)
    for keyword, value in {"language": language, "variant": variant}.items():
        if value is not None and not isinstance(value, str):
            raise InvalidArgument(f"{keyword}={short(value)} must be a name")
    if config is not None and not isinstance(config, Mapping):
        raise InvalidArgument(f"config={short(config)} must map parameters to values")
    pin = Pin(language, variant, None if config is None else Config(config))
    with LOCK:
        op = _ops.get((name, pin))
        if op is None:
            pin.check(entry)
            op = _ops[name, pin] = Op(entry, pin)
        register_with_torch()
    return op


def reload() -> None:
    """Forget the database and all choices; the next call of an operator reads and chooses again."""
    with LOCK:
        evidence.snapshot.cache_clear()
        receipts.known.cache_clear()
        code_record.find.cache_clear()
        ops = list(_ops.values())
    if "kernelcat.runtime.code" in sys.modules:
        sys.modules["kernelcat.runtime.code"].forget()
    for op in ops:  # without the lock: an operator that builds a kernel waits for imports
        op.forget()


def pinned(name: str, key: str) -> Op:
    """The operator of an entry with the pin of this key; graphs of ``torch.compile`` use it."""
    return get(name, **json.loads(key)) if key else get(name)
