"""The catalog's own source files: which belong together, and their text without comments.

Everything that asks what a kernel is made of asks here: the cache of compiled kernels, and the
digests that receipts and measurements carry. A comment, a docstring or a line break is no part of
the text, so a kernel can be explained at will; every other token is.
"""

from __future__ import annotations

import ast
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
"""Folders beside the package whose Python files are modules ``kernelcat.FOLDER...``."""

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


class WhileUnchanged(Generic[Key, Value]):
    """A function that is computed again when one of the files it read has changed.

    ``make(key)`` gives the value and the files.
    """

    def __init__(self, make: Callable[[Key], tuple[Value, Iterable[Path]]]) -> None:
        self._make = make
        self._known: dict[tuple[Path, Key], tuple[Value, dict[Path, Any]]] = {}

    def __call__(self, key: Key) -> Value:
        place = (paths.data("kernels"), key)
        known = self._known.get(place)
        if known is None or any(_stamp(file) != stamp for file, stamp in known[1].items()):
            value, files = self._make(key)
            known = self._known[place] = value, {file: _stamp(file) for file in files}
        return known[0]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


# ---- CUDA C++ ----------------------------------------------------------------------------------


def cuda_root() -> Path:
    """The folder of CUDA sources; shared headers lie in its ``include``."""
    return paths.data("kernels") / "cuda"


def cuda_files(path: Path) -> list[Path]:
    """``path`` and every file of ours that it includes, directly or not; CUDA's are left out."""
    return list(dict.fromkeys(file for file, _ in _included(path, path.parent, set())))


def cuda_text(path: Path) -> str:
    """The tokens of ``path``, with those of each included file of ours where it is first included.

    File names are no part of it, so a header can be moved or renamed.
    """
    return _cuda_texts(path)


def _all_tokens(path: Path) -> tuple[str, list[Path]]:
    parts = list(_included(path, path.parent, set()))
    return "".join(text for _, text in parts), [file for file, _ in parts]


_cuda_texts = WhileUnchanged(_all_tokens)


def _included(path: Path, beside: Path, seen: set[Path]) -> Iterator[tuple[Path, str]]:
    """Each file with the part of its tokens up to the next include, in the compiler's order."""
    seen.add(path)
    *before, rest = _split_at_includes(path.read_text(encoding="utf-8"))
    yield path, ""
    for text, name in before:
        yield path, _tokens(text)
        folders = (path.parent, beside, cuda_root() / "include")
        found = [Path(os.path.normpath(folder / name)) for folder in folders]
        ours = next((file for file in found if file.is_file()), None)
        if ours is None:
            yield path, f"#include {name}\n"
        elif ours not in seen:
            yield from _included(ours, beside, seen)
    yield path, _tokens(rest[0])


def _split_at_includes(text: str) -> list[Any]:
    """``[(text before an include, its name), ..., (text after the last,)]``."""
    parts = _INCLUDE.split(text)
    return [*zip(parts[:-1:2], parts[1::2], strict=True), (parts[-1],)]


@lru_cache(maxsize=1024)
def _tokens(text: str) -> str:
    """C++ tokens, each before a blank; a preprocessor directive ends its line."""
    lines: list[str] = []
    for directive, code in _directives(text):
        lines += (f"{m[0]} " for m in _CPP_TOKEN.finditer(code) if m["blank"] is None)
        lines += ["\n"] if directive else []
    return "".join(lines)


def _directives(text: str) -> Iterator[tuple[bool, str]]:
    """``text`` in pieces: preprocessor directives, and what stands between them."""
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
    """A comment may end on a line that goes on; it counts as a blank."""

    def keep(match: re.Match[str]) -> str:
        return " " if match[0].startswith("/*") else match[0]

    return _CPP_TOKEN.sub(keep, text)


# ---- Python ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """What an imported name means: ``name`` of ``module``; the module itself where that is None."""

    module: str
    name: str | None

    def __str__(self) -> str:
        """Without the rooms of this package, so that a move inside it changes no digest."""
        full = self.module if self.name is None else f"{self.module}.{self.name}"
        return full.rpartition(".")[2] if full.startswith("kernelcat.") else full


@dataclass(frozen=True)
class Module:
    """A Python file of the catalog: its top-level names and imports."""

    name: str
    tree: ast.Module
    bindings: Mapping[str, tuple[ast.stmt, ...]]
    imports: Mapping[str, Import]


def is_catalog(module: str) -> bool:
    """Whether ``module`` is a file of the catalog, rather than of the package or a library."""
    return any(module.startswith(f"kernelcat.{folder}.") for folder in FOLDERS)


def python_file(module: str) -> Path | None:
    """The file of a module, which for the catalog's is told without importing anything; or None."""
    if not is_catalog(module):
        spec = importlib.util.find_spec(module)
        return Path(spec.origin) if spec and spec.origin else None
    _, folder, *parts = module.split(".")
    base = paths.data(folder).joinpath(*parts)
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def python_module(name: str) -> Module:
    """The module called ``name``, of the catalog or another; raises ``ModuleNotFoundError``."""
    return _parsed(name, python_source(name))


def python_source(module: str) -> str:
    """What stands in the file of a module; raises ``ModuleNotFoundError``."""
    path = python_file(module)
    if path is None:
        raise ModuleNotFoundError(f"no module {module}", name=module)
    return path.read_text(encoding="utf-8")


def python_modules(names: Iterable[str]) -> list[Module]:
    """The modules called ``names`` and, transitively, the catalog modules they import."""
    found: dict[str, Module] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in found:
            continue
        module = found[name] = python_module(name)
        pending += [i.module for i in module.imports.values() if is_catalog(i.module)]
    return [found[name] for name in sorted(found)]


def python_files(module: str) -> list[Path]:
    """The file of a module and of all catalog modules that it imports."""
    found = (python_file(m.name) for m in python_modules([module]))
    return [path for path in found if path is not None]


def python_text(module: str) -> str:
    """The text of a module and of all catalog modules that it imports, whole."""
    return _python_texts(module)


def _all_text(module: str) -> tuple[str, list[Path]]:
    found = python_modules([module])
    text = "\n".join(_dumped(m.name, python_source(m.name)) for m in found)
    return text, python_files(module)


_python_texts = WhileUnchanged(_all_text)


@lru_cache(maxsize=1024)
def _dumped(name: str, text: str) -> str:
    return json.dumps(canonical(_parsed(name, text).tree))


@lru_cache(maxsize=1024)
def _parsed(name: str, text: str) -> Module:
    tree = ast.parse(text)
    bindings: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            for binding in bound(statement):
                bindings.setdefault(binding, []).append(statement)
    return Module(name, tree, {k: tuple(v) for k, v in bindings.items()}, imports(tree))


def bound(statement: ast.AST) -> Iterator[str]:
    """The names that a statement binds where it stands, those in its branches included.

    Variables of a comprehension and of a function are not bound there.
    """
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
        yield statement.id
    elif not isinstance(statement, _SCOPES):
        for child in ast.iter_child_nodes(statement):
            yield from bound(child)


def imports(node: ast.AST) -> dict[str, Import]:
    """Name -> what is imported under it, anywhere in ``node``."""
    found: dict[str, Import] = {}
    for statement in ast.walk(node):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                module = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or module] = Import(module, None)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            for alias in statement.names:
                found[alias.asname or alias.name] = _imported(statement.module, alias.name)
    return found


def _imported(module: str, name: str) -> Import:
    """``from module import name``, where ``name`` may itself be a catalog module."""
    inner = f"{module}.{name}"
    if is_catalog(inner) and python_file(inner) is not None:
        return Import(inner, None)
    return Import(module, name)


_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Expressions with variables of their own."""

_LEFT_OUT = ("ctx", "kind", "type_comment")


def canonical(node: Any) -> Any:
    """A syntax tree as plain JSON data: without positions and docstrings, alike in every Python."""
    if isinstance(node, ast.Constant):
        return ["Constant", repr(node.value)]
    if isinstance(node, ast.AST):
        fields = ((n, v) for n, v in ast.iter_fields(node) if n not in _LEFT_OUT)
        return [type(node).__name__, *([n, canonical(v)] for n, v in fields if v not in (None, []))]
    if isinstance(node, list | tuple):
        return [canonical(item) for item in node if not is_text(item)]
    return node


def is_text(node: Any) -> bool:
    """Whether a statement is a string alone: a docstring, or one beneath a name."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
