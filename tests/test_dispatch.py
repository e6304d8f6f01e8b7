"""Calls from end to end: arguments, the choice of a kernel, its launch, and the outputs.

`host_machine.py` replaces the GPU. All code between the arguments and the launch is the real code.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import warnings
import weakref

import pytest
from host_machine import (
    STREAM,
    Host,
    HostLauncher,
    HostTorch,
    Rows,
    choice,
    half,
    installed,
    view,
)

import kernelcat
from kernelcat import store
from kernelcat.call import arrays, fast_path, operator
from kernelcat.call.choice import Pin
from kernelcat.catalog.implementation import Config
from kernelcat.errors import (
    InvalidArgument,
    LaunchError,
    MissingDependency,
    UnknownName,
    Unsupported,
)

torch = pytest.importorskip("torch")


@pytest.fixture(params=["guards", "keys"])
def host(monkeypatch, request) -> Host:
    """The host machine, once with torch's guards to recognize signatures, once with keys only."""
    plain = HostTorch()
    assert plain._guards is not None, "torch's guards have changed: calls are 1.5 us slower"
    if request.param == "keys":
        plain._guards = None
    with installed(monkeypatch, plain) as host:
        yield host


def product(a, b, bias=None):
    exact = a.float() @ b.float().t()
    return (exact if bias is None else exact + bias).half()


def test_a_call_returns_the_output(host: Host) -> None:
    a, b, bias = half(4, 8), half(6, 8), half(6)
    op = kernelcat.get("gemm")
    assert torch.equal(op(a, b), product(a, b))
    assert torch.equal(op(a, b, bias), product(a, b, bias))
    assert torch.equal(op(a, b, bias=bias), product(a, b, bias))
    assert torch.equal(op(b=b, a=a), product(a, b))
    assert host.launches == [("gemm/cuda/tiled", STREAM)] * 4


def test_out_is_written_and_returned(host: Host) -> None:
    a, b, d = half(4, 8), half(6, 8), half(4, 6)
    op = kernelcat.get("gemm")
    for _ in range(2):
        d.fill_(7)
        assert op(a, b, out=d) is d
        assert torch.equal(d, product(a, b))


def test_a_bias_and_an_output_of_equal_shape_are_not_confused(host: Host) -> None:
    """(a, b, bias) and (a, b, out) have the same number of arrays, here even the same shapes."""
    a, b, row = half(1, 8), half(6, 8), half(1, 6)
    op = kernelcat.get("gemm")
    assert torch.equal(op(a, b, row[0]), product(a, b, row[0]))
    bias = row.clone()
    op(a, b, out=row)
    assert torch.equal(op(a, b, bias[0]), product(a, b, bias[0]))


def test_each_problem_loads_one_launcher(host: Host) -> None:
    op = kernelcat.get("gemm")
    for _ in range(3):
        op(half(4, 8), half(6, 8))
        op(half(4, 8), half(6, 8), out=half(4, 6))
    assert host.loads == [("gemm/cuda/tiled", Config(tile=16))]
    op(half(5, 8), half(6, 8))
    assert len(host.loads) == 2
    assert kernelcat.get("gemm") is op


def test_later_calls_choose_nothing(host: Host, monkeypatch) -> None:
    op = kernelcat.get("gemm")
    a, b, d = half(4, 8), half(6, 8), half(4, 6)
    op(a, b, out=d)
    op(a, b)
    monkeypatch.setattr(op, "_first_call", None)
    monkeypatch.setattr("kernelcat.call.evidence.of_entry", None)
    assert torch.equal(op(half(4, 8), b, out=d), d)
    assert op(a, b).shape == (4, 6)


def test_one_array_may_be_passed_twice(host: Host) -> None:
    op, other = kernelcat.get("gemm"), half(6, 8)
    for _ in range(3):
        assert torch.equal(op(A, A), product(A, A))
        assert torch.equal(op(A, other), product(A, other))


def test_more_signatures_than_are_compared_one_by_one(host: Host, monkeypatch) -> None:
    op = kernelcat.get("gemm")
    for m in (*range(1, 13), *range(1, 13)):
        a, d = half(m, 8), half(m, 6)
        assert torch.equal(op(a, B), product(a, B))
        assert torch.equal(op(a, B, None, out=d), product(a, B))
        assert torch.equal(op(a, B, bias=half(6) * 0, out=d), product(a, B))
    assert len(host.loads) == 24
    assert all(len(recent) <= operator.MAX_RECENT for recent in op._fresh + op._onto)


def test_the_caches_of_an_operator_are_bounded(host: Host, monkeypatch) -> None:
    monkeypatch.setattr(operator, "MAX_REMEMBERED", 3)
    op = kernelcat.get("gemm")
    for m in (1, 2, 3, 4, 5, 1):
        assert op(half(m, 8), half(6, 8)).shape == (m, 6)
    assert len(op._fast_calls) == len(op._loaded) == 3


def test_empty_arrays(host: Host) -> None:
    op = kernelcat.get("gemm")
    assert op(half(0, 8), half(6, 8)).shape == (0, 6)
    assert torch.equal(op(half(4, 0), half(6, 0)), torch.zeros(4, 6).half())
    assert op(half(4, 8), half(0, 8), out=half(4, 0)).shape == (4, 0)


def test_a_new_result_serves_only_after_reload(host: Host) -> None:
    op, a, b = kernelcat.get("gemm"), half(4, 8), half(6, 8)
    op(a, b)
    host.rows = (choice(4),)
    op(a, b)
    assert host.loads == [("gemm/cuda/tiled", Config(tile=16))]
    kernelcat.reload()
    op(a, b)
    assert host.loads[1:] == [("gemm/triton/tiled", Config(tile=64))]


def test_the_database_is_read_once(host: Host, monkeypatch) -> None:
    reads = []
    monkeypatch.setattr(store, "snapshot", lambda: reads.append(1) or Rows(()))
    for m in (1, 2, 3):
        kernelcat.get("gemm")(half(m, 8), half(6, 8))
    assert len(reads) == 1


def test_without_a_compiler_the_next_language_serves(host: Host) -> None:
    host.uninstalled = {"cuda"}
    kernelcat.get("gemm")(half(4, 8), half(6, 8))
    assert [name for name, _ in host.loads] == ["gemm/triton/tiled"]


def test_requesting_a_language_without_its_compiler_is_an_error(host: Host) -> None:
    host.uninstalled = {"cuda"}
    with pytest.raises(MissingDependency, match="pip install x"):
        kernelcat.get("gemm", language="cuda")(half(4, 8), half(6, 8))


def test_without_any_compiler_the_error_names_the_commands_that_install_them(host: Host) -> None:
    host.uninstalled = {"cuda", "triton", "cute"}
    with pytest.raises(Unsupported, match=r"cuda needs x: pip install x.*triton needs x") as caught:
        kernelcat.get("gemm")(half(4, 8), half(6, 8))
    assert "\n" not in str(caught.value)


def test_a_requested_variant_and_configuration_serve(host: Host) -> None:
    a, b = half(4, 8), half(6, 8)
    op = kernelcat.get("gemm", language="triton", variant="tiled", config={"tile": 64})
    op(a, b)
    kernelcat.get("gemm", language="triton")(a, b)
    assert host.loads == [
        ("gemm/triton/tiled", Config(tile=64)),
        ("gemm/triton/tiled", Config(tile=16)),
    ]
    assert kernelcat.get("gemm", language="triton", variant="tiled", config={"tile": 64}) is op


def test_an_unverified_kernel_warns_once(host: Host) -> None:
    op = kernelcat.get("gemm", language="cute", variant="new")
    with pytest.warns(UserWarning, match="gemm/cute/new is unverified"):
        op(half(4, 8), half(6, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(half(5, 8), half(6, 8))


def test_misses_count_calls(host: Host) -> None:
    host.rows = (choice(4),)
    op, b = kernelcat.get("gemm"), half(6, 8)
    for m, calls in ((4, 2), (64, 3), (100, 1)):
        for _ in range(calls):
            op(half(m, 8), b)
    assert [(problem["M"], count) for problem, count in fast_path.misses()] == [(64, 3), (100, 1)]


def test_get_takes_every_name_of_entries() -> None:
    assert {"gemm", "tma_copy"} <= set(kernelcat.entries())
    assert all(kernelcat.get(name).entry.name == name for name in kernelcat.entries())


def test_an_unknown_entry_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="unknown entry 'gmem'; did you mean gemm"):
        kernelcat.get("gmem")


A, B = half(4, 8), half(6, 8)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda op: op(A), "gemm needs b (arrays)"),
        (lambda op: op(), "gemm needs a and b (arrays)"),
        (lambda op: op(A, B, a=A), "gemm: a is given twice, by position and by name"),
        (lambda op: op(A, B, None, None, A), "gemm takes at most 4 arrays "
         "(a, b, bias, residual), not 5; "
         "pass the output as out="),
        (lambda op: op(A, B, bais=B), "gemm has no argument 'bais'; did you mean bias?"),
        (lambda op: op(A, 3), "gemm: b must be an array (torch, CuPy, or another with "
         "__dlpack__), not int"),
        (lambda op: op(A, B, 3), "gemm: bias must be an array (torch, CuPy, or another with "
         "__dlpack__), not int"),
        (lambda op: op(3, B), "gemm: a must be an array (torch, CuPy, or another with "
         "__dlpack__), not int"),
        (lambda op: op(A, B, out=3), "gemm: out must be an array (torch, CuPy, or another with "
         "__dlpack__), not int"),
        (lambda op: op(A, B.numpy()), "gemm: b is on the CPU; move it to a CUDA device, or call "
         'the oracle, kernelcat.reference("gemm")'),
        (lambda op: op(A.t(), B), "gemm: a is not contiguous (shape (8, 4), strides (1, 8)); "
         "pass a.contiguous()"),
        (lambda op: op(A.double(), B), "gemm: a is float64; use one of: bfloat16, float16"),
        (lambda op: op(A[0], B), "gemm: a must have 2 dimensions (M, K), not 1 "
         "(its shape is (8,))"),
        (lambda op: op(A, B[:, :7].contiguous()),
         "gemm: K differs: a.shape[1] is 8, but b.shape[1] is 7"),
        (lambda op: op(A, B, out=half(4, 7)),
         "gemm: out.shape[1] must be 6 (N or N/2), not 7"),
        (lambda op: op(A, B, out=half(4, 6).bfloat16()),
         "gemm: dtype differs: a is float16, but out is bfloat16"),
        (lambda op: op(A, B[:4], out=A[:, :4]), "gemm: out is not contiguous (shape (4, 4), "
         "strides (8, 1)); pass a contiguous array"),
        (lambda op: op(A, B, out=A.view(-1)[:24].view(4, 6)),
         "gemm: out shares memory with a; pass another array"),
        (lambda op: op(A, B, M=5), "gemm: M differs: M= is 5, but a.shape[0] is 4"),
        (lambda op: op.bind(A, B, out=A.view(-1)[:24].view(4, 6)),
         "gemm: out shares memory with a; pass another array"),
        (lambda op: op.bind(half(4, 8, offset=1), B),
         "gemm: bind needs arrays at multiples of 16 bytes; a is not at one: "
         "bind a copy of a"),
        (lambda op: op.bind(A, B, stream="default"), "stream must be a torch, CuPy or cuda.core "
         "stream or a handle, not str"),
        (lambda op: op.plan(M=4, N=6), "gemm also needs K"),
        (lambda op: op.plan(A, B)(half(5, 8), B),
         "this plan is for K=8 M=4 N=6 activation=none bias=False dtype=float16 residual=False; "
         "these arrays are K=8 M=5 N=6 activation=none bias=False dtype=float16 residual=False"),
    ],
)  # fmt: skip
def test_bad_arguments_are_a_one_line_error(host: Host, call, line: str) -> None:
    op = kernelcat.get("gemm")
    for _ in range(2):  # before and after a valid call with a similar signature
        with pytest.raises(InvalidArgument) as caught:
            call(op)
        assert str(caught.value) == line
        assert caught.value.__context__ is None or caught.value.__suppress_context__
        assert torch.equal(op(A, B), product(A, B))
        op(A, B, out=half(4, 6))


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="gemm: a is on the CPU; move it to a CUDA device"):
        kernelcat.get("gemm")(A, B)


def test_an_output_that_overlaps_is_refused_at_every_call(host: Host) -> None:
    op, memory = kernelcat.get("gemm"), half(64)
    a, d = memory[:32].view(4, 8), memory[32:56].view(4, 6)
    for _ in range(2):
        op(a, B, out=d)
        with pytest.raises(InvalidArgument, match="out shares memory with a"):
            op(a, B, out=memory[24:48].view(4, 6))


def test_gradients_are_not_dropped_silently(host: Host) -> None:
    op, weight = kernelcat.get("gemm"), torch.nn.Parameter(B)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(op(A, weight), product(A, B))
        with pytest.raises(InvalidArgument, match=r"no_grad\(\), or detach\(\) the input"):
            op(A, weight)


def test_offset_views_are_copied_with_one_warning(host: Host) -> None:
    op, a, d = kernelcat.get("gemm"), half(4, 8, offset=3), half(4, 6, offset=1)
    with pytest.warns(UserWarning, match="not a multiple of 16 bytes and is copied") as caught:
        for _ in range(2):
            assert torch.equal(op(a, B), product(a, B))
            assert op(a, B, out=d) is d
            assert torch.equal(d, product(a, B))
            aligned = half(4, 6)
            assert op(a, B, out=aligned) is aligned
            assert torch.equal(aligned, product(a, B))
    assert len(caught) == 1
    assert torch.equal(op(half(4, 8, offset=8), B), op(half(4, 8), B)) is False


def test_an_offset_output_that_is_updated_is_copied_with_its_contents(host: Host) -> None:
    gemm, memory = kernelcat.get("gemm").entry, half(25)
    updating = dataclasses.replace(
        gemm, outputs=(dataclasses.replace(gemm.outputs[0], updated=True),)
    )
    op, d, contents = operator.Op(updating, Pin()), memory[1:].view(4, 6), []
    before, load = d.clone(), host.load

    def recording_load(*arguments):
        launch = load(*arguments)

        def run(pointers, stream):
            contents.append(view(pointers[4], (4, 6)).clone())
            launch(pointers, stream)

        return run

    host.load = recording_load
    with pytest.warns(UserWarning, match="is copied"):
        assert op(A, B, out=d) is d
    assert torch.equal(contents[0], before) and torch.equal(d, product(A, B))


def test_an_offset_view_that_overlaps_is_refused(host: Host) -> None:
    memory = half(64)
    with (
        pytest.warns(UserWarning, match="is copied"),
        pytest.raises(InvalidArgument, match="out shares memory with a"),
    ):
        kernelcat.get("gemm")(memory[1:33].view(4, 8), B, out=memory[32:56].view(4, 6))


def test_bind_reads_the_current_contents_of_the_arrays(host: Host) -> None:
    a, b, d = half(4, 8), half(6, 8), half(4, 6)
    run = kernelcat.get("gemm").bind(a, b, out=d)
    assert not host.launches
    for _ in range(2):
        a.normal_()
        assert run() is d
        assert torch.equal(d, product(a, b))
    assert host.clones == 1
    assert host.launches == [("gemm/cuda/tiled", STREAM)] * 2


def test_bind_allocates_its_output_once(host: Host) -> None:
    run = kernelcat.get("gemm").bind(A, B)
    assert run() is run() is run.out
    assert torch.equal(run.out, product(A, B))


def test_bind_keeps_its_arrays_alive(host: Host) -> None:
    a = half(4, 8)
    alive = weakref.ref(a)
    run = kernelcat.get("gemm").bind(a, B)
    del a
    gc.collect()
    assert alive() is not None
    del run
    gc.collect()
    assert alive() is None


def test_bind_launches_on_its_stream(host: Host) -> None:
    kernelcat.get("gemm").bind(A, B, stream=5)()
    assert host.launches == [("gemm/cuda/tiled", 5)]


def test_a_plan_builds_ahead_and_runs_one_problem(host: Host) -> None:
    op = kernelcat.get("gemm")
    plan = op.plan(M=4, N=6, K=8, dtype="float16", bias=False)
    assert host.loads == [("gemm/cuda/tiled", Config(tile=16))]
    assert torch.equal(plan(A, B), product(A, B))
    d = half(4, 6)
    assert plan.bind(A, B, out=d)() is d
    assert len(host.loads) == 1
    assert "gemm/cuda/tiled Config(tile=16)" in repr(plan)
    assert op.plan(A, B).problem == plan.problem


def test_explain_takes_arrays_or_axes_and_launches_nothing(host: Host) -> None:
    host.rows = (choice(4),)
    op = kernelcat.get("gemm")
    explanation = op.explain(A, B)
    assert (explanation.why, explanation.implementation.name) == ("exact", "gemm/triton/tiled")
    assert explanation == op.explain(M=4, N=6, K=8, dtype="float16", bias=False)
    assert op.explain(A, B, out=half(4, 6)).problem == explanation.problem
    assert not host.loads


@pytest.mark.filterwarnings("ignore:there is no tuning database")
def test_explain_works_for_an_absent_gpu() -> None:
    op = kernelcat.get("gemm")
    explanation = op.explain(M=4096, N=4096, K=4096, dtype="bfloat16", bias=False, gpu="b200")
    assert explanation.gpu.sku == "b200" and explanation.implementation.serves("sm_100a")
    assert op.explain(A, B, gpu="h200").problem["M"] == 4
    with pytest.raises(UnknownName, match="did you mean h200"):
        op.explain(M=1, N=1, K=1, dtype="float16", bias=False, gpu="h201")


def test_a_failed_launch_raises(host: Host, monkeypatch) -> None:
    op = kernelcat.get("gemm")
    op(A, B)

    def fail(*_: object) -> None:
        raise LaunchError("the driver refused")

    monkeypatch.setattr(HostLauncher, "__call__", fail)
    for m in (4, 5):
        with pytest.raises(LaunchError, match="the driver refused"):
            op(half(m, 8), B)


def test_many_threads_share_an_operator(host: Host) -> None:
    op, wrong = kernelcat.get("gemm"), []

    def work(seed: int) -> None:
        for i in range(40):
            a = half(1 + (seed + i) % 7, 8)
            if not torch.equal(op(a, B), product(a, B)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(host.loads) == 7


class Foreign:
    """A DLPack producer of a library without an adapter, like JAX; its memory is a torch tensor."""

    def __init__(self, array) -> None:
        self.array = array

    def __dlpack__(self, **options: object) -> object:
        raise AssertionError("the test replaces from_dlpack, so nothing exports this array")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __array_namespace__(self):
        return type("Namespace", (), {"from_dlpack": staticmethod(Foreign)})


def test_foreign_inputs_give_a_foreign_output(host: Host, monkeypatch) -> None:
    waited = []
    monkeypatch.setattr(arrays, "from_dlpack", lambda array: array.array)
    monkeypatch.setattr(arrays, "synchronize", waited.append)
    op = kernelcat.get("gemm")
    result = op(Foreign(A), Foreign(B))
    assert isinstance(result, Foreign) and torch.equal(result.array, product(A, B))
    assert len(waited) == 1
    with pytest.raises(InvalidArgument, match="out must be a torch or CuPy array"):
        op(A, B, out=Foreign(half(4, 6)))
