"""The text that a digest covers: tokens of CUDA C++, and the Python definitions in reach."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kernelcat.catalog import source
from kernelcat.catalog.reach import reached

PLAIN = """
int f(int a) { return a+1; }
"""


def tokens(tmp_path: Path, text: str) -> str:
    path = tmp_path / "kernel.cu"
    path.write_text(text)
    return source.cuda_text(path)


@pytest.mark.parametrize(
    "text",
    [
        "int f(int a) {\n  return a + 1;  // one more\n}\n",
        "/* f adds\n one */ int f(int/**/a)\n{ return a\n+ 1; }",
        "int f(int a) { return a /* plus */ + 1; }",
    ],
)
def test_comments_and_white_space_leave_the_text_unchanged(tmp_path: Path, text: str) -> None:
    assert tokens(tmp_path, text).split() == tokens(tmp_path, PLAIN).split()


@pytest.mark.parametrize(
    "text",
    [
        "int f(int a) { return a - 1; }",
        "int f(int a) { return a + 10; }",
        "int f(long a) { return a + 1; }",
        '#define F "// no comment"\nint f(int a) { return a + 1; }',
        "int f(int a) { return a++ + 1; }",
    ],
)
def test_every_other_token_changes_the_text(tmp_path: Path, text: str) -> None:
    assert tokens(tmp_path, text).split() != tokens(tmp_path, PLAIN).split()


def test_comment_characters_in_strings_are_no_comments(tmp_path: Path) -> None:
    text = 'asm volatile("mov.u32 %0, 1; // a\\n" : "=r"(x)); const char* s = R"(/* b */ "c")";'
    kernel_text = tokens(tmp_path, text)
    assert "// a" in kernel_text and "/* b */" in kernel_text


def test_a_directive_ends_at_the_line_end_unless_a_backslash_continues_it(tmp_path: Path) -> None:
    one = tokens(tmp_path, "#define A 1\n#define B(x) \\\n  x + 1\nint a;")
    assert one.splitlines() == ["# define A 1 ", "# define B ( x ) x + 1 ", "int a ; "]


def test_included_files_are_inserted_at_their_first_include(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text('#pragma once\n#include "b.cuh"\nint a;\n')
    (tmp_path / "b.cuh").write_text("#pragma once\nint b;\n")
    text = tokens(tmp_path, '#include <cuda.h>\n#include "a.cuh"\n#include "b.cuh"\nint c;\n')
    order = [text.index(word) for word in ("#include cuda.h", "int b ;", "int a ;", "int c ;")]
    assert order == sorted(order) and text.count("int b ;") == 1
    names = {path.name for path in source.cuda_files(tmp_path / "kernel.cu")}
    assert names == {"kernel.cu", "a.cuh", "b.cuh"}
    (tmp_path / "b.cuh").rename(tmp_path / "other.cuh")
    (tmp_path / "a.cuh").write_text('#pragma once\n#include "other.cuh"\nint a;\n')
    (tmp_path / "kernel.cu").write_text(
        '#include <cuda.h>\n#include "a.cuh"\n#include "other.cuh"\nint c;\n'
    )
    assert source.cuda_text(tmp_path / "kernel.cu") == text


def test_a_syntax_tree_has_no_docstrings_and_no_positions() -> None:
    one = ast.parse('def f(x):\n    """Adds."""\n    return x + 1\n')
    other = ast.parse("def f(\n    x,\n):\n    return (x + 1)\n")
    assert source.canonical(one) == source.canonical(other)
    assert source.canonical(ast.parse("1")) != source.canonical(ast.parse("True"))


MODULES = {
    "kernels/cuda/one/__init__.py": """
from math import ceil
from kernelcat.kernels.cuda.two import WIDTH, Plan, unused
from kernelcat.kernels.cuda import two

HEIGHT = 4

def program(problem):
    plan = Plan.of(problem)
    return ceil(plan.tiles * WIDTH * two.DEPTH), HEIGHT

def estimate(problem):
    return Plan.of(problem).microseconds
""",
    "kernels/cuda/two.py": """
from kernelcat.reference.three import SIZE

WIDTH, DEPTH, COST = 8, SIZE, 3.5

class Plan:
    tiles_m: int

    @staticmethod
    def of(problem):
        return Plan()

    @property
    def tiles(self):
        return self._edge * 2

    @property
    def _edge(self):
        return 3

    @property
    def microseconds(self):
        return COST * self.tiles

def unused():
    return COST
""",
    "reference/three.py": "SIZE = 128\nENTRY = object()\n",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(source.paths, "data", lambda name: tmp_path / name)
    return tmp_path


def text() -> str:
    return reached("kernelcat.kernels.cuda.one", "program")


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("kernels/cuda/one/__init__.py", "HEIGHT = 4", "HEIGHT = 5"),
        ("kernels/cuda/two.py", "WIDTH, DEPTH, COST = 8", "WIDTH, DEPTH, COST = 16"),
        ("kernels/cuda/two.py", "return self._edge * 2", "return self._edge * 3"),
        ("kernels/cuda/two.py", "return 3", "return 4"),
        ("kernels/cuda/two.py", "tiles_m: int", "tiles_n: int"),
        ("reference/three.py", "SIZE = 128", "SIZE = 64"),
    ],
)
def test_a_definition_in_reach_changes_the_text(
    modules: Path, file: str, before: str, after: str
) -> None:
    text_before = text()
    (modules / file).write_text(MODULES[file].replace(before, after))
    assert text() != text_before


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("kernels/cuda/one/__init__.py", "microseconds\n", "microseconds * 2\n"),
        ("kernels/cuda/two.py", "return COST * self.tiles", "return 2 * COST * self.tiles"),
        ("kernels/cuda/two.py", "    return COST\n", "    return 2 * COST\n"),
        ("reference/three.py", "ENTRY = object()", "ENTRY = None"),
    ],
)
def test_a_definition_out_of_reach_leaves_the_text_unchanged(
    modules: Path, file: str, before: str, after: str
) -> None:
    text_before = text()
    (modules / file).write_text(MODULES[file].replace(before, after))
    assert text() == text_before


def test_the_text_depends_on_the_binding_statement_and_not_on_the_module(modules: Path) -> None:
    before = text()
    two = modules / "kernels/cuda/two.py"
    two.write_text(MODULES["kernels/cuda/two.py"].replace("WIDTH, DEPTH", "HEIGHT, WIDTH, DEPTH")
                   .replace("= 8,", "= 5, 8,"))  # fmt: skip
    assert text() != before, "another statement binds WIDTH"
    two.rename(modules / "kernels/cuda/moved.py")
    one = modules / "kernels/cuda/one/__init__.py"
    two_text = MODULES["kernels/cuda/two.py"]
    (modules / "kernels/cuda/moved.py").write_text(two_text)
    one.write_text(MODULES["kernels/cuda/one/__init__.py"]
                   .replace("cuda.two import", "cuda.moved import")
                   .replace("import two", "import moved as two"))  # fmt: skip
    assert text() == before
