"""What a function of the catalog reaches: the definitions that can take part in a call of it.

Names are followed from definition to definition and through imports between the catalog's files.
Of a class that is reached, methods and properties are taken by name: those that anything reached
asks for, and the special ones. So a program builder leaves the cost model beside it alone.

The result says which definition each name means by a number in the order of discovery, never by a
file: definitions can be moved, and two constants of one name are not mistaken for each other.
"""

from __future__ import annotations

import ast
import json
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kernelcat.catalog.source import (
    WhileUnchanged,
    bound,
    canonical,
    imports,
    is_catalog,
    python_files,
    python_module,
)

OPAQUE = ("ENTRY", "IMPLEMENTATIONS")
"""Names that are never followed: what a program takes from a specification shows in its launches,
and peers and problems are no part of a kernel."""

_MEMBERS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Definition(NamedTuple):
    """A top-level name of a module, or a ``member`` of the class of that name."""

    module: str
    name: str
    member: str = ""


class Reach:
    """Collects what roots reach; :meth:`text` is plain JSON data, the same for the same code."""

    def __init__(self) -> None:
        self._numbers: dict[Definition, int] = {}
        self._waiting: deque[Definition] = deque()
        self._attributes: set[str] = set()
        self._classes: dict[Definition, ast.ClassDef] = {}
        self._text: list[Any] = []

    def add(self, root: Callable[..., Any]) -> None:
        """Add a function, a lambda, or a ``partial`` of one, that a catalog module defines."""
        self._text.append(["root", self._value(root)])

    def add_name(self, module: str, name: str) -> None:
        """Add a definition by name, without importing its module."""
        self._text.append(["root", self._number(Definition(module, name))])

    def text(self) -> list[Any]:
        """Every definition reached, in the order of discovery."""
        while self._waiting:
            self._visit(self._waiting.popleft())
        return self._text

    # ---- roots -----------------------------------------------------------------------------

    def _value(self, value: Any) -> Any:
        """A root, or what one holds on to: arguments of a ``partial``, variables of a closure."""
        if isinstance(value, partial):
            return ["partial", *map(self._value, (value.func, *value.args)),
                    {name: self._value(v) for name, v in value.keywords.items()}]  # fmt: skip
        if callable(value) and is_catalog(getattr(value, "__module__", "")):
            return self._function(value)
        if isinstance(value, tuple | list):
            return [self._value(item) for item in value]
        if isinstance(value, dict):
            return {str(name): self._value(v) for name, v in value.items()}
        is_plain = isinstance(value, str | int | float | bool | None)
        return repr(value) if is_plain else type(value).__name__

    def _function(self, function: Any) -> Any:
        module = python_module(function.__module__)
        if function.__qualname__ in module.bindings:
            return self._number(Definition(module.name, function.__qualname__))
        held = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        cells = {name: self._value(cell.cell_contents) for name, cell in held}
        nodes = [n for n in ast.walk(module.tree) if _is_of(n, function)]
        return [[canonical(n), self._follow(n, module.name)] for n in nodes] + [cells]

    # ---- definitions -----------------------------------------------------------------------

    def _number(self, definition: Definition) -> int:
        if definition not in self._numbers:
            self._numbers[definition] = len(self._numbers)
            self._waiting.append(definition)
        return self._numbers[definition]

    def _visit(self, definition: Definition) -> None:
        number = self._numbers[definition]
        if definition.member:
            owner = self._classes[definition._replace(member="")]
            nodes: list[Any] = [s for s in owner.body if definition.member in _names(s)]
        else:
            binding = python_module(definition.module).bindings[definition.name]
            nodes = [self._header(s, definition) for s in binding]
        followed = [[canonical(n), self._follow(n, definition.module)] for n in nodes]
        self._text.append([number, definition.member or definition.name, followed])

    def _header(self, statement: ast.stmt, definition: Definition) -> ast.stmt:
        """The statement itself; of a class what is not taken by name."""
        if not isinstance(statement, ast.ClassDef):
            return statement
        self._classes[definition] = statement
        for name in (n for s in statement.body for n in _names(s)):
            if name in self._attributes or _is_special(name):
                self._number(definition._replace(member=name))
        kept = [s for s in statement.body if not _names(s)]
        return ast.ClassDef(**{**dict(ast.iter_fields(statement)), "body": kept})

    def _follow(self, node: ast.AST, module: str) -> list[list[Any]]:
        """What names in ``node`` mean: numbers of definitions, or names from elsewhere."""
        known = python_module(module)
        imported = {**known.imports, **imports(node)}
        own = set(_own_names(node))
        found: dict[str, Any] = {}
        for name, attribute in _uses(node):
            if attribute:
                self._ask_for(attribute)
            if name in own:
                continue
            source = imported.get(name)
            if source is None:
                if name in known.bindings and name not in OPAQUE:
                    found[name] = self._number(Definition(module, name))
            elif not is_catalog(source.module) or source.name in OPAQUE:
                found[name] = str(source)
            elif source.name is not None:
                found[name] = self._of(source.module, source.name)
            else:
                asked = [attribute] if attribute else python_module(source.module).bindings
                for inner in asked:
                    found[f"{name}.{inner}"] = self._of(source.module, inner)
        return [[name, value] for name, value in found.items()]

    def _of(self, module: str, name: str) -> Any:
        """The number of a name of a catalog module, or of what that module imports under it."""
        if name in OPAQUE:
            return name
        source = python_module(module).imports.get(name)
        if source is None or source.name is None:
            return self._number(Definition(module, name))
        return self._of(source.module, source.name) if is_catalog(source.module) else str(source)

    def _ask_for(self, attribute: str) -> None:
        if attribute in self._attributes:
            return
        self._attributes.add(attribute)
        for definition, owner in list(self._classes.items()):
            if any(attribute in _names(statement) for statement in owner.body):
                self._number(definition._replace(member=attribute))


def reached(module: str, name: str) -> str:
    """All that a definition reaches, as JSON; nothing is imported."""
    return _texts((module, name))


def _reached(definition: tuple[str, str]) -> tuple[str, list[Path]]:
    reach = Reach()
    reach.add_name(*definition)
    return json.dumps(reach.text()), python_files(definition[0])


_texts = WhileUnchanged(_reached)


def _uses(node: ast.AST) -> Iterator[tuple[str, str]]:
    """``(name, attribute)`` of every name and attribute; either may be empty."""
    owners = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute):
            owners.add(child.value)
            yield (child.value.id if isinstance(child.value, ast.Name) else ""), child.attr
        elif isinstance(child, ast.Name) and child not in owners:
            yield child.id, ""


def _own_names(node: ast.AST) -> Iterator[str]:
    """Parameters and variables of a function: a global of the same name is not meant by them."""
    if isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        yield from (a.arg for a in (*every, arguments.vararg, arguments.kwarg) if a is not None)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for statement in node.body:
            yield from bound(statement)


def _names(statement: ast.stmt) -> tuple[str, ...]:
    """What a class takes by name: its methods, properties and plain values, not its fields."""
    if isinstance(statement, _MEMBERS):
        return (statement.name,)
    if isinstance(statement, ast.Assign):
        return tuple(t.id for t in statement.targets if isinstance(t, ast.Name))
    return ()


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_of(node: ast.AST, function: Any) -> bool:
    """Whether ``node`` is the lambda or nested function that ``function`` was made by."""
    if not isinstance(node, ast.Lambda | ast.FunctionDef):
        return False
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    name = getattr(node, "name", "<lambda>")
    return first == function.__code__.co_firstlineno and name == function.__name__
