"""Entries as torch operators: schemas, fakes, compiled graphs.

``cpu_kernel`` registers, for these tests only, a CPU kernel of ``kernelcat::gemm`` beside the CUDA
kernel. Graphs are therefore captured, traced and run as on a GPU, except for the kernel itself.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from functools import partial

import pytest

import kernelcat
from kernelcat import catalog
from kernelcat.call import registry
from kernelcat.catalog.spec import Axis, Entry, Tensor
from kernelcat.errors import InvalidArgument

torch = pytest.importorskip("torch")
torch_ops = pytest.importorskip("kernelcat.call.torch_operators")

GEMM = catalog.entry("gemm")


def reference(a, b, bias=None):
    product = a.float() @ b.float().t()
    return (product if bias is None else product + bias).to(a.dtype)


@pytest.fixture
def cpu_kernel():
    """The pins of the calls that reached the kernel."""
    kernelcat.get("gemm")
    pins: list[str] = []

    def fresh(a, b, bias=None, residual=None, *, activation="none", pin=""):
        pins.append(pin)
        return reference(a, b, bias)

    def into(a, b, bias=None, residual=None, *, activation="none", out, pin=""):
        out.copy_(fresh(a, b, bias, pin=pin))

    library = torch.library.Library("kernelcat", "IMPL")
    library.impl("gemm", fresh, "CPU")
    library.impl("gemm_out", into, "CPU")
    yield pins
    library._destroy()
    torch._dynamo.reset()


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


ATTENTION = dataclasses.replace(
    GEMM,
    name="attention_like",
    axes=(
        Axis.size("tokens", "", 0, 9),
        Axis.size("width", "", 0, 9),
        Axis.size("top_k", "", 1, 9),
        Axis.flag("causal", ""),
        Axis.choice("layout", "", "nhd", "hnd"),
        Axis.choice("dtype", "", "float16", "bfloat16"),
    ),
    inputs=(Tensor("q", ("tokens", "width"), "dtype"),),
    outputs=(Tensor("o", ("tokens", "top_k"), "dtype"), Tensor("lse", ("tokens",), "float32")),
)
"""An entry with two outputs, and with axes that cannot be inferred from its arrays."""

GEMM_SCHEMA = (
    '(Tensor a, Tensor b, Tensor? bias=None, Tensor? residual=None, *, str activation="none"'
)


@pytest.mark.parametrize(
    ("entry", "mutating", "schema"),
    [
        (GEMM, False, GEMM_SCHEMA + ', str pin="") -> Tensor'),
        (
            GEMM,
            True,
            GEMM_SCHEMA + ', Tensor(a!) out, str pin="") -> ()',
        ),
        (catalog.entry("tma_copy"), False, '(Tensor src, *, str pin="") -> Tensor'),
        (
            ATTENTION,
            False,
            "(Tensor q, *, SymInt top_k, bool causal=False, str layout, "
            'str pin="") -> (Tensor, Tensor)',
        ),
        (
            ATTENTION,
            True,
            "(Tensor q, *, SymInt top_k, bool causal=False, str layout, "
            'Tensor(a!) o, Tensor(b!) lse, str pin="") -> ()',
        ),
    ],
)
def test_the_schema_follows_from_the_specification(
    entry: Entry, mutating: bool, schema: str
) -> None:
    assert torch_ops.schema(entry, mutating=mutating) == schema
    torch._C.parse_schema(f"kernelcat::x{schema}")


@pytest.mark.parametrize("name", catalog.names())
def test_every_entry_becomes_an_operator(name: str) -> None:
    kernelcat.get(name)
    for form in [f"{name}_out"] if catalog.entry(name).updated else [name, f"{name}_out"]:
        overload = getattr(torch.ops.kernelcat, form).default
        assert torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CUDA")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "Meta")


@pytest.mark.parametrize("name", catalog.names())
def test_named_problems_can_be_called_and_their_outputs_have_the_specified_shapes(
    name: str,
) -> None:
    entry = kernelcat.get(name).entry
    kinds = {tuple(t.present(p) for t in entry.tensors): p for p in entry.problems.values()}
    for problem in kinds.values():

        def meta(tensor: Tensor, problem=problem) -> torch.Tensor | None:
            if not tensor.present(problem):
                return None
            shape, element = tensor.shape_of(problem), getattr(torch, tensor.dtype_of(problem))
            return torch.empty(shape, dtype=element, device="meta")

        keywords = {axis.name: problem[axis.name] for axis in torch_ops.keyword_axes(entry)}
        inputs, outs = map(meta, entry.inputs), [meta(tensor) for tensor in entry.outputs]
        if any(tensor.updated and tensor.present(problem) for tensor in entry.outputs):
            call = getattr(torch.ops.kernelcat, f"{name}_out")
            names = ["out"] if len(outs) == 1 else [tensor.name for tensor in entry.outputs]
            call(*inputs, **keywords, **dict(zip(names, outs, strict=True)))
            continue
        results = getattr(torch.ops.kernelcat, name)(*inputs, **keywords)
        made = [out for out in outs if out is not None]
        for result, out in zip([results] if len(outs) == 1 else results, made, strict=True):
            assert (result.shape, result.dtype) == (out.shape, out.dtype), problem


def test_what_an_optional_array_determines_may_be_left_out() -> None:
    assert "SymInt? N=None" in torch_ops.schema(catalog.entry("nvfp4_matmul"))
    assert "SymInt? hidden=None" in torch_ops.schema(catalog.entry("moe_route"))
    kernelcat.get("moe_route")
    meta = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    x, router = meta(6, 64), meta(16, 64)
    expert_ids, *_ = torch.ops.kernelcat.moe_route(None, x, router, top_k=2)
    assert expert_ids.shape == (6, 2)


@pytest.mark.parametrize(
    ("choice", "present"), [({}, "y"), ({"out_format": "fp8"}, "q scale")], ids=["same", "fp8"]
)
def test_a_call_on_fakes_returns_none_for_outputs_that_a_choice_leaves_out(
    choice: dict[str, str], present: str
) -> None:
    from torch._subclasses import FakeTensorMode

    op = kernelcat.get("rms_norm")
    with FakeTensorMode():
        x, w = (torch.empty(size, device="cuda", dtype=torch.bfloat16) for size in ((5, 256), 256))
        outputs = dict(zip([t.name for t in op.entry.outputs], op(x, w, **choice), strict=True))
        listed = torch.ops.kernelcat.rms_norm(x, w, **choice)
    made = {name: array for name, array in outputs.items() if array is not None}
    assert " ".join(made) == present and len(listed) == len(made)
    assert all(
        array.numel() == (10 if name == "scale" else 5 * 256) for name, array in made.items()
    )


def test_a_compiled_graph_keeps_an_operator_whose_outputs_depend_on_a_choice() -> None:
    op, cases = kernelcat.get("lm_head"), []
    library = torch.library.Library("kernelcat", "IMPL")

    def kernel(x, w, *, top_k, has_logits=False, logits_dtype="float32", pin=""):
        cases.append(has_logits)
        logits = x.float() @ w.float().t()
        values, ids = logits.topk(top_k)
        return [values, ids.int(), *([logits] if has_logits else [])]

    library.impl("lm_head", kernel, "CPU")

    def step(x, w, has_logits):
        values, ids, logits = op(x * 2, w, top_k=3, has_logits=has_logits)
        return values, ids, None if logits is None else logits + 1

    x, w = half(4, 16), half(40, 16)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = (x * 2).float() @ w.float().t()
    for has_logits in (False, True):
        values, ids, logits = compiled(x, w, has_logits)
        assert torch.equal(values, expected.topk(3).values) and ids.dtype == torch.int32
        assert torch.equal(logits, expected + 1) if has_logits else logits is None
    assert cases == [False, True]
    library._destroy()
    torch._dynamo.reset()


def test_meta_tensors_give_shape_and_type() -> None:
    kernelcat.get("gemm")
    meta = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    d = torch.ops.kernelcat.gemm(meta(4, 8), meta(6, 8))
    assert (tuple(d.shape), d.dtype, d.device.type) == ((4, 6), torch.bfloat16, "meta")


def test_sizes_derived_from_axes_are_those_of_the_output() -> None:
    kernelcat.get("gemm")
    gemm, meta = torch.ops.kernelcat.gemm, partial(torch.empty, device="meta", dtype=torch.float16)
    assert gemm(meta(4, 8), meta(6, 8), activation="swiglu").shape == (4, 3)
    residual = meta(4, 3)
    assert gemm(meta(4, 8), meta(6, 8), None, residual, activation="swiglu").shape == (4, 3)
    with pytest.raises(RuntimeError, match=r"residual\.shape\[1\] must be N or N/2"):
        gemm(meta(4, 8), meta(6, 8), None, residual)


def test_a_packed_cache_has_half_the_elements_of_a_head() -> None:
    kernelcat.get("paged_attn")
    meta = partial(torch.empty, device="meta")
    ints = (meta(2, 2, dtype=torch.int32), *(meta(n, dtype=torch.int32) for n in (2, 3)))
    scales = 2 * (meta(4, 16, 2, 4, dtype=torch.float8_e4m3fn),)

    def attend(row: int) -> torch.Tensor:
        cache = meta(4, 16, 2, row, dtype=torch.float4_e2m1fn_x2)
        q = meta(2, 4, 64, dtype=torch.bfloat16)
        return torch.ops.kernelcat.paged_attn(q, cache, cache, *ints, None, None, None, *scales)

    assert attend(32)[0].shape == (2, 4, 64)
    with pytest.raises(RuntimeError, match=r"k_cache\.shape\[3\] must be head_dim or head_dim/2"):
        attend(64)


def test_block_scales_have_derived_shapes_and_their_own_types() -> None:
    kernelcat.get("fp8_quantize")
    quantize = torch.ops.kernelcat.fp8_quantize
    q, scale = quantize(torch.empty(5, 300, device="meta", dtype=torch.bfloat16), block="1x128")
    assert (q.shape, q.dtype) == ((5, 300), torch.float8_e4m3fn)
    assert (scale.shape, scale.dtype) == ((3, 5), torch.float32)


def test_element_types_that_follow_from_a_choice() -> None:
    kernelcat.get("nvfp4_quantize")
    kernelcat.get("nvfp4_dequantize")
    x = torch.empty(5, 64, device="meta", dtype=torch.bfloat16)
    q, scale = torch.ops.kernelcat.nvfp4_quantize(x, format="mxfp4", scale_layout="swizzled")
    assert (q.shape, q.dtype) == ((5, 32), torch.float4_e2m1fn_x2)
    assert (scale.shape, scale.dtype) == ((128, 4), torch.float8_e8m0fnu)
    back = torch.ops.kernelcat.nvfp4_dequantize(q, scale, scale_layout="swizzled")
    assert (back.shape, back.dtype) == ((5, 64), torch.bfloat16)


def test_a_fake_of_several_outputs_and_keyword_axes() -> None:
    q = torch.empty(5, 7, device="meta", dtype=torch.float16)
    o, lse = torch_ops._fake(ATTENTION, (q,), {"top_k": 3, "causal": True, "layout": "nhd"})
    assert (tuple(o.shape), o.dtype) == ((5, 3), torch.float16)
    assert (tuple(lse.shape), lse.dtype) == ((5,), torch.float32)


@pytest.mark.parametrize("name", ["gptoss-8-mxfp4", "gptoss-8-bf16", "dsv3-8-fp8-a8"])
def test_fakes_read_the_format_of_weights_from_their_scales(name: str) -> None:
    kernelcat.get("moe_mlp")
    entry = catalog.entry("moe_mlp")
    problem = entry.named(name)

    def array(tensor):
        if not tensor.present(problem):
            return None
        element = getattr(torch, tensor.dtype_of(problem))
        return torch.empty(tensor.shape_of(problem), device="meta", dtype=element)

    inputs = tuple(map(array, entry.inputs))
    keywords = {axis.name: problem[axis.name] for axis in torch_ops.keyword_axes(entry)}
    del keywords["format"]
    out = torch.ops.kernelcat.moe_mlp(*inputs, **keywords)
    assert (out.shape, out.dtype) == ((8, problem["hidden"]), torch.bfloat16)


def test_a_fake_without_scales_asks_for_the_format() -> None:
    entry = catalog.entry("moe_mlp")
    problem = entry.named("gptoss-8-mxfp4")
    inputs = [
        torch.empty(t.shape_of(problem), device="meta", dtype=getattr(torch, t.dtype_of(problem)))
        if t.flag is None else None
        for t in entry.inputs
    ]  # fmt: skip
    keywords = {axis.name: problem[axis.name] for axis in torch_ops.keyword_axes(entry)}
    with pytest.raises(InvalidArgument, match="moe_mlp also needs format="):
        torch_ops._fake(entry, inputs, keywords | {"format": None})


def test_fake_cuda_tensors_go_through_the_operator() -> None:
    from torch._subclasses import FakeTensorMode

    op = kernelcat.get("gemm")
    with FakeTensorMode():
        a, b, d = (
            torch.empty(s, device="cuda", dtype=torch.float16) for s in [(4, 8), (6, 8), (4, 6)]
        )
        d_fake = op(a, b)
        assert (tuple(d_fake.shape), d_fake.device.type) == ((4, 6), "cuda")
        assert op(a, b, out=d) is d


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 8), (6, 9)), "gemm: b: K is 9, but 8 elsewhere"),
        (((4, 8, 1), (6, 8)), "gemm: a must have 2 dimensions"),
        (((4, 8), (6, 8), (5,)), "gemm: bias: N is 5, but 6 elsewhere"),
    ],
)
def test_fakes_refuse_inconsistent_shapes(shapes, message: str) -> None:
    kernelcat.get("gemm")
    arrays = [torch.empty(shape, device="meta", dtype=torch.float16) for shape in shapes]
    with pytest.raises(RuntimeError, match=message):
        torch.ops.kernelcat.gemm(*arrays)


def test_fakes_refuse_mixed_types() -> None:
    kernelcat.get("gemm")
    a = torch.empty(4, 8, device="meta", dtype=torch.float16)
    with pytest.raises(RuntimeError, match=r"b is torch\.bfloat16; it must be torch\.float16"):
        torch.ops.kernelcat.gemm(a, a.bfloat16())


def test_sizes_stay_symbolic_in_an_export(cpu_kernel) -> None:
    op = kernelcat.get("gemm")

    class Layer(torch.nn.Module):
        def forward(self, x, w):
            return op(x, w) * 2

    rows = torch.export.Dim("rows", min=2, max=512)
    exported = torch.export.export(
        Layer(), (half(4, 8), half(6, 8)), dynamic_shapes=({0: rows}, None), strict=True
    )
    targets = [str(node.target) for node in exported.graph.nodes]
    assert "kernelcat.gemm.default" in targets
    x, w = half(9, 8), half(6, 8)
    assert torch.equal(exported.module()(x, w), reference(x, w) * 2)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_graph_keeps_the_operator(cpu_kernel, dynamic: bool | None) -> None:
    op, graphs = kernelcat.get("gemm"), []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    def layer(x, w, bias):
        return torch.relu(op(x + 1, w, bias=bias)) - op(x, w)

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (4, 5, 7):
        x, w, bias = half(rows, 8), half(6, 8), half(6)
        expected = torch.relu(reference(x + 1, w, bias)) - reference(x, w)
        assert torch.equal(compiled(x, w, bias), expected)
    assert graphs[0].count("kernelcat.gemm.default") == 2
    assert len(graphs) == (1 if dynamic else 2)  # the second shape triggers a dynamic graph
    assert set(cpu_kernel) == {""}


def test_aot_autograd_keeps_it_and_functionalizes_out(cpu_kernel) -> None:
    op = kernelcat.get("gemm")

    def layer(x, w, d):
        op(x * 2, w, out=d)
        return d + 1

    x, w, d = half(4, 8), half(6, 8), half(4, 6)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, w, d), reference(x * 2, w) + 1)
    assert torch.equal(d, reference(x * 2, w))


def test_the_pin_of_get_is_an_argument_in_the_graph(cpu_kernel) -> None:
    op = kernelcat.get("gemm", language="cuda", variant="naive")
    compiled = torch.compile(lambda x, w: op(x, w), fullgraph=True, backend="aot_eager")
    compiled(half(4, 8), half(6, 8))
    assert cpu_kernel == ['{"language":"cuda","variant":"naive"}']
    assert registry.pinned("gemm", cpu_kernel[0]) is op
    assert registry.pinned("gemm", "") is kernelcat.get("gemm")


def test_a_tensor_subclass_goes_through_torchs_dispatcher(cpu_kernel) -> None:
    class Marked(torch.Tensor):
        pass

    a, b = half(4, 8), half(6, 8)
    d = kernelcat.get("gemm")(a.as_subclass(Marked), b)
    assert torch.equal(d.as_subclass(torch.Tensor), reference(a, b))
    assert cpu_kernel == [""]


def test_the_operators_pass_torchs_opcheck(cpu_kernel) -> None:
    """Checks schema, fake against real results, aliasing, functionalization, dynamic shapes."""
    a, b, bias = half(4, 8), half(6, 8), half(6)
    for arguments in ((a, b), (a, b, bias)):
        torch.library.opcheck(torch.ops.kernelcat.gemm.default, arguments)
        torch.library.opcheck(torch.ops.kernelcat.gemm_out.default, arguments, {"out": half(4, 6)})


def test_operators_found_before_torch_was_imported_become_torch_operators_too() -> None:
    code = """
import kernelcat
early = kernelcat.get("gemm")
import torch
kernelcat.get("tma_copy")
assert torch.ops.kernelcat.gemm.default and torch.ops.kernelcat.tma_copy_out.default
a = torch.empty(4, 8, device="meta")
print(tuple(torch.ops.kernelcat.gemm(a, a).shape))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(4, 4)"


# ---- on a GPU -------------------------------------------------------------------------------


def cuda(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


@pytest.mark.gpu
def test_gpu_opcheck() -> None:
    kernelcat.get("gemm")
    kernelcat.get("tma_copy")
    a, b, bias = cuda(64, 64), cuda(128, 64), cuda(128)
    for arguments in ((a, b), (a, b, bias)):
        torch.library.opcheck(torch.ops.kernelcat.gemm.default, arguments)
        torch.library.opcheck(
            torch.ops.kernelcat.gemm_out.default, arguments, {"out": cuda(64, 128)}
        )
    torch.library.opcheck(torch.ops.kernelcat.tma_copy.default, (a,))
    torch.library.opcheck(torch.ops.kernelcat.tma_copy_out.default, (a,), {"out": cuda(64, 64)})


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_gpu_compile_keeps_the_operator(backend: str) -> None:
    op = kernelcat.get("gemm")

    def layer(x, w, bias):
        return torch.relu(op(x * 2, w, bias))

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for rows in (64, 100, 128):
        x, w, bias = cuda(rows, 64), cuda(128, 64), cuda(128)
        expected = torch.relu((x * 2).float() @ w.float().t() + bias.float())
        assert torch.allclose(compiled(x, w, bias).float(), expected, rtol=2**-6, atol=0.1)


@pytest.mark.gpu
def test_gpu_compile_with_cuda_graphs() -> None:
    op = kernelcat.get("gemm")
    compiled = torch.compile(lambda x, w: op(x, w) + 1, fullgraph=True, mode="reduce-overhead")
    w = cuda(128, 64)
    for _ in range(4):
        x = cuda(64, 64)
        expected = x.float() @ w.float().t() + 1
        assert torch.allclose(compiled(x, w).float(), expected, rtol=2**-6, atol=0.1)
