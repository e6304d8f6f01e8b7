"""What is text of a source and what is not: tokens of CUDA C++, definitions of Python."""

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
def test_comments_and_layout_are_no_part_of_the_text(tmp_path: Path, text: str) -> None:
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
def test_every_other_token_is(tmp_path: Path, text: str) -> None:
    assert tokens(tmp_path, text).split() != tokens(tmp_path, PLAIN).split()


def test_strings_keep_what_looks_like_a_comment(tmp_path: Path) -> None:
    text = 'asm volatile("mov.u32 %0, 1; // a\\n" : "=r"(x)); const char* s = R"(/* b */ "c")";'
    found = tokens(tmp_path, text)
    assert "// a" in found and "/* b */" in found


def test_a_directive_ends_with_its_line_and_may_go_on_on_the_next(tmp_path: Path) -> None:
    one = tokens(tmp_path, "#define A 1\n#define B(x) \\\n  x + 1\nint a;")
    assert one.splitlines() == ["# define A 1 ", "# define B ( x ) x + 1 ", "int a ; "]


def test_included_files_stand_where_they_are_included_first(tmp_path: Path) -> None:
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
def test_what_a_function_reaches_changes_its_text(
    modules: Path, file: str, before: str, after: str
) -> None:
    was = text()
    (modules / file).write_text(MODULES[file].replace(before, after))
    assert text() != was


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("kernels/cuda/one/__init__.py", "microseconds\n", "microseconds * 2\n"),
        ("kernels/cuda/two.py", "return COST * self.tiles", "return 2 * COST * self.tiles"),
        ("kernels/cuda/two.py", "    return COST\n", "    return 2 * COST\n"),
        ("reference/three.py", "ENTRY = object()", "ENTRY = None"),
    ],
)
def test_what_it_does_not_reach_leaves_the_text(
    modules: Path, file: str, before: str, after: str
) -> None:
    was = text()
    (modules / file).write_text(MODULES[file].replace(before, after))
    assert text() == was


def test_a_definition_can_move_and_two_of_one_name_are_told_apart(modules: Path) -> None:
    was = text()
    two = modules / "kernels/cuda/two.py"
    two.write_text(MODULES["kernels/cuda/two.py"].replace("WIDTH, DEPTH", "HEIGHT, WIDTH, DEPTH")
                   .replace("= 8,", "= 5, 8,"))  # fmt: skip
    assert text() != was, "the statement that binds WIDTH is another one"
    two.rename(modules / "kernels/cuda/moved.py")
    one = modules / "kernels/cuda/one/__init__.py"
    two_text = MODULES["kernels/cuda/two.py"]
    (modules / "kernels/cuda/moved.py").write_text(two_text)
    one.write_text(MODULES["kernels/cuda/one/__init__.py"]
                   .replace("cuda.two import", "cuda.moved import")
                   .replace("import two", "import moved as two"))  # fmt: skip
    assert text() == was
