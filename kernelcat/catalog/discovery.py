"""Discovery of entries and implementations by file name; a file is imported when first needed."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

from kernelcat import paths
from kernelcat.catalog.implementation import LANGUAGES, Implementation
from kernelcat.catalog.spec import Entry
from kernelcat.errors import MissingDependency, UnknownName, nearest, short
from kernelcat.importing import import_module

INSTALL = {
    "cuda": "pip install kernelcat",
    "triton": "pip install 'kernelcat[triton]'",
    "cute": "pip install 'kernelcat[cute]'",
}
"""Language -> the command that installs the language's compiler."""

_MODULES = {"cuda": "cuda.bindings", "triton": "triton", "cute": "cutlass"}

ahead: set[str] = set()
"""Languages with kernels that were compiled ahead: to describe launches takes no compiler."""


@cache
def names() -> tuple[str, ...]:
    """Every entry's name, sorted. Reads the folders of specifications, imports nothing."""
    files = (path for folder in paths.folders("reference") for path in folder.glob("[a-z]*.py"))
    return tuple(sorted({path.stem for path in files}))


def add_entries(root: str | os.PathLike[str]) -> None:
    """Let the catalog have a package's entries: ``reference/NAME.py``, ``kernels/LANGUAGE/NAME``.

    The package calls this when it is imported, with its folder. A file that has the name of a
    catalog file does not count. ``$KERNELCAT_ENTRIES`` does the same for the command line.

    Raises
    ------
    InvalidArgument
        ``root`` has no folder ``reference``.
    """
    paths.add(root)
    for function in (names, complete, languages):
        function.cache_clear()


def entry(name: str) -> Entry:
    """The specification of the entry ``name``.

    Raises
    ------
    UnknownName
        There is no such entry; the message lists the nearest names.
    """
    if not isinstance(name, str) or name not in names():
        raise UnknownName(f"unknown entry {short(name)}{nearest(name, list(names()))}")
    return _specification(name)


@cache
def _specification(name: str) -> Entry:
    specification: Entry = import_module(f"kernelcat.reference.{name}").ENTRY
    return specification


@cache
def complete() -> tuple[str, ...]:
    """Names of the entries that are not work in progress; imports every specification."""
    return tuple(name for name in names() if not entry(name).work_in_progress)


@cache
def languages(name: str) -> tuple[str, ...]:
    """The languages that entry ``name`` has kernel files in; imports nothing."""
    files, roots = (f"{name}.py", f"{name}/__init__.py"), paths.folders("kernels")
    return tuple(
        language
        for language in LANGUAGES
        if any((root / language / file).is_file() for root in roots for file in files)
    )


@cache
def in_language(name: str, language: str) -> tuple[Implementation, ...]:
    """The implementations of an entry in one language, lowest rank first; none is no error.

    Raises
    ------
    UnknownName
        There is no such language.
    MissingDependency
        The language's compiler is not installed, and no kernel in this language was compiled
        ahead; the message has the command that installs the compiler.
    """
    if language not in LANGUAGES:
        raise UnknownName(f"unknown language {language!r}{nearest(language, list(LANGUAGES))}")
    if language not in languages(name):
        return ()
    if lacking := lacks_compiler(language):
        raise MissingDependency(lacking)
    module = import_module(f"kernelcat.kernels.{language}.{name}")
    return tuple(sorted(module.IMPLEMENTATIONS, key=lambda i: i.rank))


def lacks_compiler(language: str) -> str | None:
    """The compiler that ``language`` lacks, with the command that installs it; None: it has one."""
    compiler = _MODULES[language]
    if language in ahead or installed(compiler):
        return None
    return f"{language} needs the module {compiler!r}: {INSTALL[language]}"


def installed(module: str) -> bool:
    """Whether ``module`` can be imported; imports at most the packages that contain ``module``."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # ValueError: sys.modules holds None for the module
        return False


def implementations(name: str) -> tuple[Implementation, ...]:
    """The implementations of an entry in every language whose compiler is installed."""
    result: list[Implementation] = []
    for language in languages(entry(name).name):
        try:
            result += in_language(name, language)
        except MissingDependency:
            continue
    return tuple(result)


def implementation(name: str, language: str, variant: str) -> Implementation:
    """One implementation by name.

    Raises
    ------
    UnknownName
        There is no such entry, language or variant; the message lists the nearest names.
    MissingDependency
        The language's compiler is not installed.
    """
    variants = {i.variant: i for i in in_language(entry(name).name, language)}
    if variant not in variants:
        raise UnknownName(
            f"{name} has no {language} variant {variant!r}{nearest(variant, list(variants))}"
        )
    return variants[variant]
