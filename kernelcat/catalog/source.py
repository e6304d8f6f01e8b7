"""Source files of kernels: which files belong together, and their text without comments.

The cache of compiled kernels and the digests in receipts and measurements take the text of a
kernel from this module. Comments, docstrings and line breaks are no part of that text, so a change
of explanations changes no digest; every other token is part of the text.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from kernelcat import paths

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

FOLDERS = ("kernels", "reference")
"""Folders of the catalog; their Python files are the modules ``kernelcat.FOLDER...``."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"][^\n]*\n?', re.MULTILINE)
_CPP_TOKEN = re.compile(
    r"""(?P<blank>(?:\s|\\\n)+ | //[^\n]* | /\*.*?\*/)
    | (?:u8|[uUL])?R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)"          # raw string
    | (?:u8|[uUL])?"(?:\\.|[^"\\])*" | (?:u8|[uUL])?'(?:\\.|[^'\\])*'
    | \.?\d(?:'?[\w.]|(?<=[eEpP])[+-])*                             # number
    | [A-Za-z_]\w*
    | <<=|>>=|\.\.\.|->\*|<=>|::|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\#\#|[-+*/%&|^]=
    | .""",
    re.VERBOSE | re.DOTALL,
)


class FileFunction(Generic[Key, Value]):
    """A function of files whose values are remembered until one of the files changes.

    ``compute(key)`` returns the value and the files that the value depends on.
    """

    def __init__(self, compute: Callable[[Key], tuple[Value, Iterable[Path]]]) -> None:
        self._compute = compute
        self._remembered: dict[tuple[Path, Key], tuple[Value, dict[Path, Any]]] = {}

    def __call__(self, key: Key) -> Value:
        full_key = (paths.data("kernels"), key)  # tests move the folder of kernels
        entry = self._remembered.get(full_key)
        if entry is None or any(_stamp(file) != stamp for file, stamp in entry[1].items()):
            value, files = self._compute(key)
            entry = self._remembered[full_key] = value, {file: _stamp(file) for file in files}
        return entry[0]


def _stamp(path: Path) -> tuple[int, int] | None:
    """Modification time in ns and size in bytes; None for a file that cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def instance_digest(text: str, instance: list[Any]) -> str:
    """SHA-256 in hex of the JSON of ``[text, instance]``.

    ``text`` may have hundreds of kilobytes and many instances, so it is hashed once for all.
    """
    hashed = _hashed(text).copy()
    hashed.update(f"{json.dumps(instance)}]".encode())
    return hashed.hexdigest()


@lru_cache(maxsize=64)
def _hashed(text: str) -> Any:
    return hashlib.sha256(f"[{json.dumps(text)}, ".encode())


# ---- CUDA C++ ----------------------------------------------------------------------------------


def cuda_root() -> Path:
    """The folder of CUDA sources; shared headers are in its folder ``include``."""
    return paths.data("kernels") / "cuda"


def cuda_file(name: str) -> Path:
    """The CUDA source ``name`` (``gemm/wgmma.cu``) of the catalog, or of a user's entries."""
    folders = (cuda_root(), *(folder / "cuda" for folder in paths.folders("kernels")))
    return next((f / name for f in folders if (f / name).is_file()), cuda_root() / name)


def cuda_files(path: Path) -> list[Path]:
    """``path`` and every catalog file that ``path`` includes, directly or not.

    CUDA's own headers are left out.
    """
    return list(dict.fromkeys(file for file, _ in _included(path, path.parent, set())))


def cuda_text(path: Path) -> str:
    """The tokens of ``path``; each catalog file stands in full where it is first included.

    Names of catalog files are no part of the text, so a header can be moved or renamed.
    """
    return _cuda_texts(path)


def _all_tokens(path: Path) -> tuple[str, list[Path]]:
    parts = list(_included(path, path.parent, set()))
    return "".join(text for _, text in parts), [file for file, _ in parts]


_cuda_texts = FileFunction(_all_tokens)


def _included(path: Path, beside: Path, visited: set[Path]) -> Iterator[tuple[Path, str]]:
    """Pairs of a file and tokens up to its next include, in the order the compiler reads them."""
    visited.add(path)
    *before, rest = _split_at_includes(path.read_text(encoding="utf-8"))
    yield path, ""
    for text, name in before:
        yield path, _tokens(text)
        folders = (path.parent, beside, cuda_root() / "include")
        candidates = [Path(os.path.normpath(folder / name)) for folder in folders]
        header = next((file for file in candidates if file.is_file()), None)
        if header is None:  # a header of CUDA
            yield path, f"#include {name}\n"
        elif header not in visited:
            yield from _included(header, beside, visited)
    yield path, _tokens(rest[0])


def _split_at_includes(text: str) -> list[Any]:
    """``[(text before an include, included name), ..., (text after the last include,)]``."""
    parts = _INCLUDE.split(text)
    return [*zip(parts[:-1:2], parts[1::2], strict=True), (parts[-1],)]


@lru_cache(maxsize=1024)
def _tokens(text: str) -> str:
    """C++ tokens with a blank after each; a line break follows every preprocessor directive."""
    lines: list[str] = []
    for directive, code in _directives(text):
        lines += (f"{m[0]} " for m in _CPP_TOKEN.finditer(code) if m["blank"] is None)
        lines += ["\n"] if directive else []
    return "".join(lines)


def _directives(text: str) -> Iterator[tuple[bool, str]]:
    """Pieces of ``text`` in order: True with a preprocessor directive, False with other code."""
    code: list[str] = []
    lines = iter(_without_block_comments(text).split("\n"))
    for line in lines:
        if not line.lstrip().startswith("#"):
            code.append(line)
            continue
        yield False, "\n".join(code)
        code = []
        while line.endswith("\\"):
            line = line[:-1] + " " + next(lines, "")
        yield True, line
    yield False, "\n".join(code)


def _without_block_comments(text: str) -> str:
    """``text`` with a blank for each block comment: code may follow a comment on its last line."""

    def replacement(match: re.Match[str]) -> str:
        return " " if match[0].startswith("/*") else match[0]

    return _CPP_TOKEN.sub(replacement, text)


# ---- Python ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """The meaning of an imported name: ``name`` of ``module``, or the module where name is None."""

    module: str
    name: str | None

    def __str__(self) -> str:
        """The full name; for this package only the last part, so moves inside it change nothing."""
        full = self.module if self.name is None else f"{self.module}.{self.name}"
        return full.rpartition(".")[2] if full.startswith("kernelcat.") else full


@dataclass(frozen=True)
class Module:
    """A parsed Python file.

    ``bindings`` maps each top-level name to the statements that bind the name; ``imports`` maps
    each imported name to its meaning.
    """

    name: str
    tree: ast.Module
    bindings: Mapping[str, tuple[ast.stmt, ...]]
    imports: Mapping[str, Import]


def is_catalog(module: str) -> bool:
    """Whether ``module`` is in one of :data:`FOLDERS`, not in the package or a library."""
    return any(module.startswith(f"kernelcat.{folder}.") for folder in FOLDERS)


def python_file(module: str) -> Path | None:
    """The file of a module, or None. Imports nothing for a module of the catalog."""
    if not is_catalog(module):
        spec = importlib.util.find_spec(module)
        return Path(spec.origin) if spec and spec.origin else None
    _, folder, *parts = module.split(".")
    bases = (root.joinpath(*parts) for root in paths.folders(folder))
    candidates = (
        path for base in bases for path in (base.with_suffix(".py"), base / "__init__.py")
    )
    return next((path for path in candidates if path.is_file()), None)


def python_module(name: str) -> Module:
    """The parsed module ``name``, of the catalog or not; raises ``ModuleNotFoundError``."""
    return _parsed(name, python_source(name))


def python_source(module: str) -> str:
    """The content of a module's file; raises ``ModuleNotFoundError``."""
    path = python_file(module)
    if path is None:
        raise ModuleNotFoundError(f"no module {module}", name=module)
    return path.read_text(encoding="utf-8")


def python_modules(names: Iterable[str]) -> list[Module]:
    """The modules ``names`` and all catalog modules that they import, directly or not; sorted."""
    modules: dict[str, Module] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in modules:
            continue
        module = modules[name] = python_module(name)
        pending += [i.module for i in module.imports.values() if is_catalog(i.module)]
    return [modules[name] for name in sorted(modules)]


def python_files(module: str) -> list[Path]:
    """The files of a module and of all catalog modules that it imports, directly or not."""
    files = (python_file(m.name) for m in python_modules([module]))
    return [path for path in files if path is not None]


def python_text(module: str) -> str:
    """The full text of a module and of all catalog modules that it imports, directly or not."""
    return _python_texts(module)


def _all_text(module: str) -> tuple[str, list[Path]]:
    modules = python_modules([module])
    text = "\n".join(_canonical_text(m.name, python_source(m.name)) for m in modules)
    return text, python_files(module)


_python_texts = FileFunction(_all_text)


@lru_cache(maxsize=1024)
def _canonical_text(name: str, text: str) -> str:
    return json.dumps(canonical(_parsed(name, text).tree))


@lru_cache(maxsize=1024)
def _parsed(name: str, text: str) -> Module:
    tree = ast.parse(text)
    bindings: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            for binding in bound_names(statement):
                bindings.setdefault(binding, []).append(statement)
    return Module(name, tree, {k: tuple(v) for k, v in bindings.items()}, imports(tree))


def bound_names(statement: ast.AST) -> Iterator[str]:
    """The names that a statement binds in its own scope, those in its branches included.

    Variables of comprehensions and functions inside the statement belong to other scopes.
    """
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
        yield statement.id
    elif not isinstance(statement, _SCOPES):
        for child in ast.iter_child_nodes(statement):
            yield from bound_names(child)


def imports(node: ast.AST) -> dict[str, Import]:
    """Imported name -> its meaning, for all import statements in ``node`` but relative ones."""
    meanings: dict[str, Import] = {}
    for statement in ast.walk(node):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                module = alias.name if alias.asname else alias.name.partition(".")[0]
                meanings[alias.asname or module] = Import(module, None)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            for alias in statement.names:
                meanings[alias.asname or alias.name] = _import_from(statement.module, alias.name)
    return meanings


def _import_from(module: str, name: str) -> Import:
    """The meaning of ``from module import name``, where ``name`` may be a catalog module."""
    inner = f"{module}.{name}"
    if is_catalog(inner) and python_file(inner) is not None:
        return Import(inner, None)
    return Import(module, name)


_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Expressions that are scopes: names bound inside are not visible outside."""

_OMITTED_FIELDS = ("ctx", "kind", "type_comment")


def canonical(node: Any) -> Any:
    """A syntax tree as plain JSON data, without positions and docstrings.

    The result is the same in every version of Python.
    """
    if isinstance(node, ast.Constant):
        return ["Constant", repr(node.value)]
    if isinstance(node, ast.AST):
        fields = ((n, v) for n, v in ast.iter_fields(node) if n not in _OMITTED_FIELDS)
        return [type(node).__name__, *([n, canonical(v)] for n, v in fields if v not in (None, []))]
    if isinstance(node, list | tuple):
        return [canonical(item) for item in node if not is_bare_string(item)]
    return node


def is_bare_string(node: Any) -> bool:
    """Whether a statement is a string literal alone: the docstring of a function or of a name."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
