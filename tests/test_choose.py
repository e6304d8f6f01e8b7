"""The choice of an implementation and configuration: order of evidence, pins, explanations."""

from __future__ import annotations

import pytest

from kernelcat import catalog
from kernelcat.call.choice import Pin, choose
from kernelcat.catalog.digest import digest
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument, MissingDependency, UnknownName, Unsupported
from kernelcat.report.explain import Explanation
from kernelcat.runtime import gpu
from kernelcat.store import Choice, calibration

GEMM = catalog.entry("gemm")
H200, B200, A100 = gpu.SKUS["h200"], gpu.SKUS["b200"], gpu.SKUS["a100"]


def problem(m: int, n: int = 4096, k: int = 4096, dtype: str = "bfloat16") -> Problem:
    return GEMM.problem(M=m, N=n, K=k, dtype=dtype, bias=False)


def kernel(language: str, variant: str, rank: int, **more) -> Implementation:
    """An implementation whose parameter ``tile`` must not be larger than M."""
    facts = {
        "archs": ("sm_80+",),
        "space": {"tile": (16, 64, 256)},
        "illegal": lambda config, p, gpu: (
            f"tile={config['tile']} is larger than M={p['M']}" if config["tile"] > p["M"] else None
        ),
        "default": lambda p, gpu: Config(tile=16),
        "program": lambda p, config, gpu: None,
        "estimate": lambda p, config, gpu: 1.0,
    }
    return Implementation("gemm", language, variant, "", rank=rank, **{**facts, **more})


LADDER = {
    "cuda": (kernel("cuda", "naive", 0), kernel("cuda", "tiled", 1)),
    "triton": (kernel("triton", "tiled", 1), kernel("triton", "tma", 2, archs=("sm_90a",))),
    "cute": (
        kernel("cute", "tiled", 1),
        kernel("cute", "new", 9, unverified="needs a Blackwell GPU"),
        kernel("cute", "only_b200", 3, archs=("sm_100a",), unverified="nobody has one"),
    ),
}


@pytest.fixture(autouse=True)
def ladder(monkeypatch) -> dict[str, tuple[Implementation, ...]]:
    by_language = dict(LADDER)

    def in_language(name: str, language: str) -> tuple[Implementation, ...]:
        if not by_language[language]:
            raise MissingDependency(f"{language} needs the module 'x': pip install x")
        return by_language[language]

    for module in (catalog, catalog.discovery):
        monkeypatch.setattr(module, "in_language", in_language)
        monkeypatch.setattr(module, "languages", lambda name: tuple(by_language))
    for name in ("models", "lent"):  # the shipped ones are of other kernels
        monkeypatch.setattr(calibration, name, lambda sku: {})
    return by_language


def row(
    p: Problem, variant: str = "cuda/tiled", tile: int = 64, sku: str = "h200", **more
) -> Choice:
    language, _, variant = variant.partition("/")
    facts = {"kind": "measured", "median_us": 10.0, "source": "old", "run": "r", "origin": "local"}
    return Choice("gemm", sku, p, language, variant, Config(tile=tile), **{**facts, **more})


def chosen(p: Problem, rows=(), on=H200, **more) -> tuple[str, str, int]:
    decision = choose(GEMM, p, on, rows, **{"models": {}} | more)
    return decision.why, decision.implementation.name, decision.config["tile"]


EVIDENCE = [
    row(problem(4096), tile=256, kind="predicted"),
    row(problem(4000), sku="h100"),
    row(problem(4096), "triton/tiled", sku="h100"),
    row(problem(3000), "triton/tma"),
    row(problem(4000), "cute/tiled"),
    row(problem(4096), "cuda/naive"),
]


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (6, ("exact", "gemm/cuda/naive", 64)),
        (5, ("bucket", "gemm/cute/tiled", 64)),
        (4, ("bucket", "gemm/triton/tma", 64)),
        (3, ("borrowed", "gemm/triton/tiled", 64)),
        (2, ("borrowed", "gemm/cuda/tiled", 64)),
        (1, ("predicted", "gemm/cuda/tiled", 256)),
        (0, ("default", "gemm/triton/tma", 16)),
    ],
)
def test_the_better_evidence_comes_first(known: int, expected: tuple[str, str, int]) -> None:
    assert chosen(problem(4096), EVIDENCE[:known]) == expected


def test_within_a_bucket_the_nearest_problem_decides() -> None:
    rows = [row(problem(2100), "cuda/naive"), row(problem(4000), "cuda/tiled")]
    assert chosen(problem(3900), rows)[1] == "gemm/cuda/tiled"
    assert chosen(problem(2200), rows)[1] == "gemm/cuda/naive"


def test_minor_choice_axes_share_a_bucket_and_major_ones_do_not() -> None:
    rows = [row(problem(4096, dtype="float16"), "cuda/naive")]
    assert chosen(problem(4096), rows)[0] == "bucket"
    copy = catalog.entry("tma_copy")
    sizes = {"rows": 8, "cols": 8, "src_stride": 8, "dst_stride": 8}
    buckets = {copy.bucket(copy.problem(**sizes, dtype=d)) for d in ("bfloat16", "float16")}
    assert len(buckets) == 2


def test_without_better_evidence_the_nearest_problem_decides() -> None:
    rows = [row(problem(1000), "cute/tiled"), row(problem(9000), "triton/tma")]
    assert chosen(problem(2500), rows)[:2] == ("nearest", "gemm/cute/tiled")
    assert chosen(problem(5000), rows)[:2] == ("nearest", "gemm/triton/tma")
    small = [row(problem(1000), "cute/tiled", tile=4096)]
    assert chosen(problem(2500), small) == ("nearest", "gemm/cute/tiled", 16)
    assert chosen(problem(2500, n=64, k=64), rows)[0] == "default"
    assert choose(GEMM, problem(5000), H200, rows).missed


def test_the_nearest_problem_of_a_sibling_decides_before_defaults() -> None:
    rows = [row(problem(1000), "cute/tiled", sku="h100")]
    assert chosen(problem(2500), rows)[:2] == ("borrowed nearest", "gemm/cute/tiled")
    rows.append(row(problem(9000), "triton/tma"))
    assert chosen(problem(2500), rows)[:2] == ("nearest", "gemm/triton/tma")
    assert choose(GEMM, problem(2500), H200, rows[:1]).missed


def test_results_of_another_architecture_are_not_used() -> None:
    assert chosen(problem(4096), [row(problem(4096), sku="a100")])[0] == "default"
    assert chosen(problem(4096), [row(problem(4096), sku="somebody-elses")])[0] == "default"


def test_results_of_a_mig_slice_are_borrowed() -> None:
    assert chosen(problem(4096), [row(problem(4096), sku="h200-mig-1g.18gb")])[0] == "borrowed"


def test_illegal_and_unknown_rows_are_skipped() -> None:
    rows = [
        row(problem(100), tile=256),
        row(problem(100), "cuda/gone"),
        row(problem(100), "triton/tma", tile=64),
    ]
    decision = choose(GEMM, problem(100), H200, rows)
    assert decision.implementation.name == "gemm/triton/tma"
    assert [c.rejected for c in decision.considered] == [
        "tile=256 is larger than M=100",
        "gemm has no cuda variant 'gone'; known: naive, tiled",
        None,
    ]


def test_rows_of_an_older_specification_are_ignored() -> None:
    outdated = row(Problem.of("gemm", M=4096, N=4096))
    assert chosen(problem(4096), [outdated])[0] == "default"


def test_the_highest_rank_serves_and_languages_break_ties(ladder) -> None:
    assert chosen(problem(4096), on=A100)[1] == "gemm/cuda/tiled"
    ladder["cuda"] = ()
    assert chosen(problem(4096), on=A100)[1] == "gemm/triton/tiled"


def too_large(config: Config, p: Problem, gpu) -> str | None:
    return "more than half of a tile is empty" if 2 * p["M"] < 4 * config["tile"] else None


def test_what_is_not_worth_a_try_serves_only_where_nothing_else_does(ladder) -> None:
    ladder["triton"] = (kernel("triton", "tma", 2, unpromising=too_large),)
    assert chosen(problem(32))[1] == "gemm/triton/tma"
    assert chosen(problem(31))[1] == "gemm/cuda/tiled"
    ladder["cuda"] = ladder["cute"] = ()
    assert chosen(problem(31))[1] == "gemm/triton/tma"


def test_what_is_not_worth_a_try_serves_if_it_was_measured_or_is_pinned(ladder) -> None:
    ladder["triton"] = (kernel("triton", "tma", 2, unpromising=too_large),)
    rows = [row(problem(80), "triton/tma")]
    assert chosen(problem(80), rows) == ("exact", "gemm/triton/tma", 64)
    assert chosen(problem(81), rows) == ("nearest", "gemm/triton/tma", 16)
    pin = Pin("triton", "tma", Config(tile=64))
    assert chosen(problem(80), pin=pin) == ("forced", "gemm/triton/tma", 64)
    assert chosen(problem(20), pin=Pin("triton", "tma"))[1] == "gemm/triton/tma"


def test_rows_of_an_uninstalled_language_are_skipped(ladder) -> None:
    ladder["cuda"] = ()
    rows = [row(problem(4096), "cuda/tiled"), row(problem(4096), "cute/tiled")]
    decision = choose(GEMM, problem(4096), H200, rows)
    assert decision.implementation.name == "gemm/cute/tiled"
    assert "pip install" in str(decision.considered[0].rejected)


def test_a_language_whose_compiler_is_missing_is_skipped() -> None:
    missing = {"triton": "triton needs x: pip install x"}
    assert chosen(problem(4096), missing=missing)[1] == "gemm/cuda/tiled"


def test_unverified_implementations_serve_only_where_no_other_does(ladder) -> None:
    assert chosen(problem(4096), [row(problem(4096), "cute/new")])[1] == "gemm/triton/tma"
    ladder["cuda"] = ladder["triton"] = ()
    ladder["cute"] = LADDER["cute"][1:]
    assert chosen(problem(4096))[1] == "gemm/cute/new"
    assert chosen(problem(4096), [row(problem(4096), "cute/new")])[0] == "exact"


def test_unverified_implementations_serve_when_pinned() -> None:
    assert chosen(problem(4096), pin=Pin("cute", "new"))[1] == "gemm/cute/new"
    assert chosen(problem(4096), pin=Pin("cute"))[1] == "gemm/cute/tiled"


def test_a_pin_restricts_the_evidence() -> None:
    rows = EVIDENCE
    assert chosen(problem(4096), rows, pin=Pin("cute"))[:2] == ("bucket", "gemm/cute/tiled")
    assert chosen(problem(4096), rows, pin=Pin("cuda", "tiled"))[0] == "borrowed"
    pin = Pin("cuda", "tiled", Config(tile=16))
    assert chosen(problem(4096), rows, pin=pin) == ("forced", "gemm/cuda/tiled", 16)


def test_the_error_where_nothing_serves_the_problem() -> None:
    with pytest.raises(Unsupported) as caught:
        choose(GEMM, problem(8), H200)
    assert str(caught.value) == (
        "gemm: nothing serves K=4096 M=8 N=4096 activation=none bias=False dtype=bfloat16 "
        "residual=False on h200 (sm_90a): "
        "gemm/cute/new, gemm/triton/tma, gemm/cuda/tiled, gemm/triton/tiled, gemm/cute/tiled, "
        "gemm/cuda/naive: tile=16 is larger than M=8; gemm/cute/only_b200: serves sm_100a, "
        "not sm_90a"
    )


def test_the_error_where_nothing_serves_the_architecture(ladder) -> None:
    ladder["cuda"] = ladder["cute"] = ()
    ladder["triton"] = LADDER["triton"][1:]
    with pytest.raises(Unsupported) as caught:
        choose(GEMM, problem(4096), B200)
    message = str(caught.value)
    assert "gemm/triton/tma: serves sm_90a, not sm_100a" in message
    assert "gemm/cuda: cuda needs the module 'x': pip install x" in message
    assert "\n" not in message


def test_an_illegal_pinned_configuration_is_an_error() -> None:
    with pytest.raises(Unsupported, match="gemm/cuda/tiled: tile=256 is larger than M=100"):
        choose(GEMM, problem(100), H200, pin=Pin("cuda", "tiled", Config(tile=256)))


@pytest.mark.parametrize(
    ("pin", "error", "message"),
    [
        (Pin("cudda"), UnknownName, "did you mean cuda"),
        (Pin("cuda", "tield"), UnknownName, "did you mean tiled"),
        (Pin(variant="tiled"), InvalidArgument, "also needs language="),
        (Pin("cuda", config=Config(tile=16)), InvalidArgument, "also needs language= and variant="),
        (Pin("cuda", "tiled", Config(tiel=16)), InvalidArgument, "has exactly: tile"),
    ],
)
def test_the_error_of_a_wrong_pin_names_the_alternatives(
    pin: Pin, error, message: str, monkeypatch
) -> None:
    if pin.language == "cudda":
        monkeypatch.undo()
    with pytest.raises(error, match=message):
        pin.check(GEMM)


def test_a_pin_has_a_canonical_text() -> None:
    assert Pin().key == ""
    assert Pin("cuda", "tiled", Config(tile=16)).key == (
        '{"config":{"tile":16},"language":"cuda","variant":"tiled"}'
    )


def test_only_exact_and_bucket_measurements_of_this_gpu_are_no_misses() -> None:
    missed = [choose(GEMM, problem(4096), H200, EVIDENCE[:n]).missed for n in range(7)]
    assert missed == [True, True, True, True, False, False, False]


def test_the_text_of_an_explanation() -> None:
    rows = [row(problem(100), tile=256), row(problem(100), "triton/tma")]
    explanation = Explanation.of(problem(100), H200, choose(GEMM, problem(100), H200, rows))
    assert str(explanation) == (
        "gemm K=4096 M=100 N=4096 activation=none bias=False dtype=bfloat16 residual=False "
        "on h200 (sm_90a)\n"
        "  gemm/triton/tma tile=64\n"
        "  exact: measured for this problem on this GPU\n"
        "  evidence: 10.00 us measured on h200 for K=4096 M=100 N=4096 activation=none bias=False "
        "dtype=bfloat16 residual=False (run r, local)\n"
        "  stale: the kernel runs other code than was measured; tune it again\n"
        "  rejected before:\n"
        "    gemm/cuda/tiled (exact): tile=256 is larger than M=100"
    )


def test_an_explanation_is_stale_only_when_the_source_differs() -> None:
    source = digest(LADDER["cuda"][1])
    rows = [row(problem(4096), source=source)]
    decision = choose(GEMM, problem(4096), H200, rows)
    assert not Explanation.of(problem(4096), H200, decision).stale


def test_a_measurement_serves_other_epilogues_of_the_same_product() -> None:
    with_epilogue = Problem.of(
        "gemm", **{**problem(100).values, "activation": "silu", "bias": True}
    )
    assert chosen(with_epilogue, [row(problem(100), "triton/tma")])[:2] == (
        "bucket",
        "gemm/triton/tma",
    )
