"""Triton compiled ahead of time: parameters, descriptors, errors, digests; no GPU needed."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Int32, Int64, Pointer, Step, TensorMap
from kernelcat.errors import CompileError
from kernelcat.jit import cache, interpreter, triton
from kernelcat.runtime import gpu

H200 = gpu.find("h200")
SIZES = {Pointer: (8, 8), Int32: (4, 4), Int64: (8, 8), TensorMap: (128, 64)}
"""Parameter class -> bytes and alignment with which the launcher passes a parameter."""

KERNEL = """
import triton
import triton.language as tl
from {helper} import {name}

@triton.jit
def fill(out, value, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), {name}(value))
"""
HELPER = """
import triton

@triton.jit
def twice(x):
    return 2 * x
"""


def step_of(variant: str, config: Config, **sizes: int) -> Step:
    problem = catalog.entry("gemm").problem(**sizes, dtype="bfloat16", bias=True)
    implementation = catalog.implementation("gemm", "triton", variant)
    assert implementation.why_not(config, problem, H200) is None
    return implementation.program(problem, config, H200).steps[0]


STEPS = {
    "pointers": step_of("naive", Config(tile="32x32x32"), M=40, N=40, K=40),
    "descriptors": step_of("tma", Config(tile="64x64x128", stages=3, split_k=1), M=40, N=40, K=40),
    "both": step_of("tma", Config(tile="16x64x128", stages=3, split_k=2), M=9, N=41, K=1024),
    "Gluon": step_of(
        "gluon",
        Config(tile="128x128x64", schedule="cooperative", subtiles=2, tail_splits=2),
        M=200,
        N=80,
        K=800,
    ),
}


@pytest.fixture(scope="module", params=list(STEPS))
def compiled(request: pytest.FixtureRequest):
    step = STEPS[request.param]
    return step, step.source.compile("sm_90a")


def test_the_number_of_warps_counts_every_role(compiled) -> None:
    step, artifact = compiled
    # Gluon: two warpgroups are consumers; the single producer warp is padded to a warpgroup.
    warps = 12 if step is STEPS["Gluon"] else 4
    assert artifact.metadata["num_warps"] == warps


def parameters_of_cubin(cubin: bytes, tmp_path: Path) -> list[tuple[int, int]]:
    """Offset (from the first parameter) and size of every kernel parameter, from the ELF file."""
    import triton as package

    (tmp_path / "kernel.cubin").write_bytes(cubin)
    tool = Path(package.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run(
        [tool, "-elf", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    pattern = r"Ordinal : 0x(\w+)\s+Offset\s+: 0x(\w+)\s+Size\s+: 0x(\w+)"
    parameters = sorted(
        tuple(int(x, 16) for x in match) for match in set(re.findall(pattern, text))
    )
    return [(offset - parameters[0][1], size) for _, offset, size in parameters]


def test_parameters_have_the_offsets_that_the_launcher_uses(compiled, tmp_path: Path) -> None:
    step, artifact = compiled
    assert artifact.metadata["hidden_params"] == ["null", "null"]
    expected, end = [], 0
    for kind in [*map(type, step.params), Pointer, Pointer]:
        size, alignment = SIZES[kind]
        start = -(-end // alignment) * alignment
        expected.append((start, size))
        end = start + size
    assert parameters_of_cubin(artifact.cubin, tmp_path) == expected


def test_an_artifact_survives_the_cache(compiled) -> None:
    _, artifact = compiled
    assert cache.decode(cache.encode(artifact, "key"), "key") == artifact
    assert artifact.metadata["registers"] > 0
    assert artifact.metadata["cluster"] == [1, 1, 1]


def test_a_descriptor_with_another_layout_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "box_of", lambda dtype, block: ((32, block[0]), 64))
    with pytest.raises(CompileError, match="descriptors have layouts"):
        STEPS["descriptors"].source.compile("sm_90a")


@pytest.fixture
def fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that writes two modules and returns the TritonSource of a kernel in them.

    ``name`` is the helper function that the kernel calls; ``options`` go to ``triton.step``.
    """
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str = "twice", **options: int) -> triton.TritonSource:
        (tmp_path / "kc_helper.py").write_text(HELPER)
        (tmp_path / "kc_fill.py").write_text(KERNEL.format(helper="kc_helper", name=name))
        arguments = {"out": triton.pointer("out", "float32"), "value": triton.integer(3)}
        step = triton.step("kc_fill:fill", (1, 1, 1), arguments, {"BLOCK": 32}, **options)
        return step.source

    yield make
    for name in ("kc_fill", "kc_helper"):
        sys.modules.pop(name, None)


def test_the_error_of_a_kernel_that_does_not_compile_is_one_line(fill, capsys) -> None:
    source = fill()
    text = KERNEL.format(helper="kc_helper", name="twice").replace("+ tl.arange", "@ tl.arange")
    Path(sys.path[0], "kc_fill.py").write_text(text)
    with pytest.raises(CompileError) as caught:
        source.compile("sm_90a")
    assert str(caught.value).startswith("fill does not compile for sm_90a: ")
    assert "\n" not in str(caught.value)
    assert "tl.store" in caught.value.log
    assert capsys.readouterr().out == ""


def test_output_of_other_threads_is_not_captured(capsys) -> None:
    log = triton._Log()
    log.write("ours")
    other = threading.Thread(target=log.write, args=("theirs",))
    other.start()
    other.join()
    assert log.getvalue() == "ours"
    assert capsys.readouterr().out == "theirs"


def test_compiling_is_refused_while_triton_interpret_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(CompileError, match="unset it"):
        STEPS["pointers"].source.compile("sm_90a")


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_103a", "sm_120a"])
def test_a_kernel_compiles_for_other_architectures(fill, arch: str) -> None:
    artifact = fill(num_warps=2).compile(arch)
    assert (artifact.arch, artifact.kernel) == (arch, "fill")
    assert artifact.metadata["num_warps"] == 2
    assert artifact.cubin.startswith(b"\x7fELF")


def test_a_digest_changes_with_options_constants_divisors_and_text(fill) -> None:
    source = fill()
    before = source.digest()
    assert fill().digest() == before
    assert fill(num_warps=8).digest() != before
    fields = {**source.__dict__, "constants": {"BLOCK": 64}}
    assert triton.TritonSource(**fields).digest() != before
    assert triton.TritonSource(**{**source.__dict__, "divisors": {}}).digest() != before
    path = Path(sys.path[0], "kc_fill.py")
    path.write_text(path.read_text() + "CHANGED = 1\n")
    assert source.digest() != before


def test_planning_and_looking_up_never_import_the_compiler() -> None:
    code = (
        "import sys; from kernelcat import catalog; from kernelcat.runtime import gpu\n"
        "i = catalog.implementation('gemm', 'triton', 'tma'); target = gpu.find('h200')\n"
        "problem = catalog.entry('gemm').named('4096x4096x4096')\n"
        "step = i.program(problem, i.default(problem, target), target).steps[0]\n"
        "step.source.digest(), step.source.toolchain()\n"
        "sys.exit('triton' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_toolchain_names_the_compiler_in_use() -> None:
    import triton as package

    assert STEPS["pointers"].source.toolchain() == f"triton {package.__version__}"


def test_each_thread_block_of_a_cluster_loads_a_part_of_the_tile() -> None:
    for cluster, rows in ((((1, 0),), 64), (((0, 0),), 128), ((), 128)):
        argument = triton.descriptor(
            "a", "bfloat16", (512, 512), (128, 64), gluon=True, cluster=cluster
        )
        assert argument.params[0].box == (64, rows)
        assert triton.parse_descriptor(argument.type) == ("bfloat16", (rows, 64))


def test_integers_get_the_smallest_width_and_their_divisor() -> None:
    assert triton.integer(24) == triton.Argument("i32", (Int32(24),), 8)
    assert triton.integer(24, divisor=1).divisor == 1
    assert triton.integer(1 << 32) == triton.Argument("i64", (Int64(1 << 32),), 16)


def test_the_interpreter_rounds_and_multiplies_bfloat16_like_a_gpu() -> None:
    import triton.language as tl
    from triton.runtime import interpreter as theirs

    values = np.float32([1.0, 1.00390625, 1.01171875, 1.0078125, -3.14159, np.inf, np.nan, 0.0])
    with interpreter.true_floats():
        bits = theirs._convert_float(values, tl.float32, tl.bfloat16, None)
        back = theirs._convert_float(bits, tl.bfloat16, tl.float32, None)
        eye = theirs.TensorHandle(np.full((16, 16), 0x3F80, np.uint16), tl.bfloat16)
        zero = theirs.TensorHandle(np.zeros((16, 16), np.float32), tl.float32)
        product = theirs.interpreter_builder.create_dot(eye, eye, zero, None, 0)
        tiny = theirs.TensorHandle(np.full(4, 0x0040, np.uint16), tl.bfloat16)  # 2^-127
        large = theirs.TensorHandle(np.full(4, 0x7E80, np.uint16), tl.bfloat16)  # 2^126
        half = theirs.interpreter_builder.create_fmul(tiny, large)
    np.testing.assert_array_equal(
        back, np.float32([1.0, 1.0, 1.015625, 1.0078125, -3.140625, np.inf, np.nan, 0.0])
    )
    assert (product.data == 16.0).all()
    assert (half.data == 0x3F00).all() and half.dtype == tl.bfloat16


def test_the_interpreter_converts_and_multiplies_float8_like_a_gpu() -> None:
    import triton.language as tl
    from triton.runtime import interpreter as theirs

    fp8 = tl.float8e4nv
    values = np.float32([1.0, 1.0625, 1.1875, 1000.0, -3.14159, 2.0**-9, 2.0**-10, np.nan, 0.0])
    with interpreter.true_floats():
        bits = theirs._convert_float(values, tl.float32, fp8, None)
        back = theirs._convert_float(bits, fp8, tl.float32, None)
        half = theirs._convert_float(bits, fp8, tl.float16, None).view(np.float16)
        ones = theirs.TensorHandle(np.full((16, 16), 0x38, np.uint8), fp8)
        zero = theirs.TensorHandle(np.zeros((16, 16), np.float32), tl.float32)
        product = theirs.interpreter_builder.create_dot(ones, ones, zero, None, 0)
    expected = [1.0, 1.0, 1.25, 448.0, -3.25, 2.0**-9, 0.0, np.nan, 0.0]
    np.testing.assert_array_equal(back, np.float32(expected))
    np.testing.assert_array_equal(half, np.float16(expected))
    assert (product.data == 16.0).all()


@pytest.mark.parametrize("names", [("b", "a"), ("a",), ("a", "b", "c")])
def test_arguments_in_another_order_than_the_kernels_are_refused(names, monkeypatch) -> None:
    """Compiled kernels take them by place, though the interpreter takes them by name."""
    kernel = triton.TritonSource(
        "module", "kernel", dict.fromkeys(names, "i32"), {}, {"BLOCK": 16}, {}
    )
    function = SimpleNamespace(arg_names=["a", "b", "BLOCK"])
    monkeypatch.setattr(triton.TritonSource, "function", lambda self: function)
    with pytest.raises(CompileError, match="kernel takes a, b, and is given"):
        kernel.verify_order()
