"""Definitions that a function of the catalog reaches: those that can take part in a call of it.

Names are followed from definition to definition and through imports between catalog files. A class
contributes its fields and decorators, its special methods, and the methods and properties whose
names occur as an attribute in any reached definition. So a program builder does not reach the cost
model in the same file.

In the result each name stands for a definition by a number, in the order of discovery, and never
by a file: definitions can be moved, and two constants with one name are told apart.
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
    FileFunction,
    bound_names,
    canonical,
    imports,
    is_catalog,
    python_files,
    python_module,
)

OPAQUE = ("ENTRY", "IMPLEMENTATIONS")
"""Names that are never followed. What a program takes from a specification appears in the launches
of the program; peers and problems are no part of a kernel."""

_MEMBERS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Definition(NamedTuple):
    """A top-level name of a module, or a ``member`` of the class with that name."""

    module: str
    name: str
    member: str = ""


class Reach:
    """Collects the definitions that roots reach; equal code gives an equal :meth:`text`."""

    def __init__(self) -> None:
        self._numbers: dict[Definition, int] = {}
        self._pending: deque[Definition] = deque()
        self._attributes: set[str] = set()
        self._classes: dict[Definition, ast.ClassDef] = {}
        self._text: list[Any] = []

    def add(self, root: Callable[..., Any]) -> None:
        """Add a function or a lambda of a catalog module, or a ``partial`` of a function."""
        self._text.append(["root", self._value(root)])

    def add_name(self, module: str, name: str) -> None:
        """Add a definition by name, without importing the module."""
        self._text.append(["root", self._number(Definition(module, name))])

    def text(self) -> list[Any]:
        """Every reached definition, in the order of discovery, as plain JSON data."""
        while self._pending:
            self._visit(self._pending.popleft())
        return self._text

    # ---- roots -----------------------------------------------------------------------------

    def _value(self, value: Any) -> Any:
        """A root, an argument of a ``partial``, or a variable of a closure."""
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
        closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        cells = {name: self._value(cell.cell_contents) for name, cell in closure}
        nodes = [n for n in ast.walk(module.tree) if _is_source_of(n, function)]
        return [[canonical(n), self._follow(n, module.name)] for n in nodes] + [cells]

    # ---- definitions -----------------------------------------------------------------------

    def _number(self, definition: Definition) -> int:
        if definition not in self._numbers:
            self._numbers[definition] = len(self._numbers)
            self._pending.append(definition)
        return self._numbers[definition]

    def _visit(self, definition: Definition) -> None:
        number = self._numbers[definition]
        if definition.member:
            owner = self._classes[definition._replace(member="")]
            nodes: list[Any] = [s for s in owner.body if definition.member in _member_names(s)]
        else:
            binding = python_module(definition.module).bindings[definition.name]
            nodes = [self._header(s, definition) for s in binding]
        followed = [[canonical(n), self._follow(n, definition.module)] for n in nodes]
        self._text.append([number, definition.member or definition.name, followed])

    def _header(self, statement: ast.stmt, definition: Definition) -> ast.stmt:
        """The statement itself, or a class without the members that are reached by name."""
        if not isinstance(statement, ast.ClassDef):
            return statement
        self._classes[definition] = statement
        for name in (n for s in statement.body for n in _member_names(s)):
            if name in self._attributes or _is_special(name):
                self._number(definition._replace(member=name))
        fields = [s for s in statement.body if not _member_names(s)]
        return ast.ClassDef(**{**dict(ast.iter_fields(statement)), "body": fields})

    def _follow(self, node: ast.AST, module: str) -> list[list[Any]]:
        """Pairs of a name in ``node`` and its meaning: number of a definition, or outside name."""
        parsed = python_module(module)
        imported = {**parsed.imports, **imports(node)}
        local_names = set(_local_names(node))
        meanings: dict[str, Any] = {}
        for name, attribute in _uses(node):
            if attribute:
                self._reach_members(attribute)
            if name in local_names:
                continue
            source = imported.get(name)
            if source is None:
                if name in parsed.bindings and name not in OPAQUE:
                    meanings[name] = self._number(Definition(module, name))
            elif not is_catalog(source.module) or source.name in OPAQUE:
                meanings[name] = str(source)
            elif source.name is not None:
                meanings[name] = self._resolve(source.module, source.name)
            else:  # a module: its attribute, or everything in a module that is passed on whole
                for inner in [attribute] if attribute else python_module(source.module).bindings:
                    meanings[f"{name}.{inner}"] = self._resolve(source.module, inner)
        return [[name, meaning] for name, meaning in meanings.items()]

    def _resolve(self, module: str, name: str) -> Any:
        """The meaning of a name in a catalog module, followed through that module's imports."""
        if name in OPAQUE:
            return name
        source = python_module(module).imports.get(name)
        if source is None or source.name is None:
            return self._number(Definition(module, name))
        if not is_catalog(source.module):
            return str(source)
        return self._resolve(source.module, source.name)

    def _reach_members(self, attribute: str) -> None:
        """Reach the members called ``attribute`` of all reached classes, now and later."""
        if attribute in self._attributes:
            return
        self._attributes.add(attribute)
        for definition, owner in list(self._classes.items()):
            if any(attribute in _member_names(statement) for statement in owner.body):
                self._number(definition._replace(member=attribute))


def reached(module: str, name: str) -> str:
    """Every definition that ``name`` of ``module`` reaches, as JSON text; imports nothing."""
    return _texts((module, name))


def _reached(definition: tuple[str, str]) -> tuple[str, list[Path]]:
    reach = Reach()
    reach.add_name(*definition)
    return json.dumps(reach.text()), python_files(definition[0])


_texts = FileFunction(_reached)


def _uses(node: ast.AST) -> Iterator[tuple[str, str]]:
    """``(name, attribute)`` for every name and attribute in ``node``; either may be empty."""
    owners = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute):
            owners.add(child.value)
            yield (child.value.id if isinstance(child.value, ast.Name) else ""), child.attr
        elif isinstance(child, ast.Name) and child not in owners:
            yield child.id, ""


def _local_names(node: ast.AST) -> Iterator[str]:
    """Parameters and variables of a function, which hide globals with the same names."""
    if isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        yield from (a.arg for a in (*every, arguments.vararg, arguments.kwarg) if a is not None)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for statement in node.body:
            yield from bound_names(statement)


def _member_names(statement: ast.stmt) -> tuple[str, ...]:
    """Names of the methods, properties and plain values that a statement of a class defines.

    Annotated fields are not members: they always belong to the class.
    """
    if isinstance(statement, _MEMBERS):
        return (statement.name,)
    if isinstance(statement, ast.Assign):
        return tuple(t.id for t in statement.targets if isinstance(t, ast.Name))
    return ()


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_source_of(node: ast.AST, function: Any) -> bool:
    """Whether ``node`` is the lambda or nested function whose evaluation made ``function``."""
    if not isinstance(node, ast.Lambda | ast.FunctionDef):
        return False
    first_line = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    name = getattr(node, "name", "<lambda>")
    return first_line == function.__code__.co_firstlineno and name == function.__name__
