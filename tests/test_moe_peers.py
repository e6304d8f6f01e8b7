"""FlashInfer's and QuACK's peers of `moe_mlp` and `moe_gemm`: their arguments mean the problem.

The libraries need a GPU, so stand-ins do what their documentation says (`fake_moe_peers`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from kernelcat import catalog
from kernelcat.errors import MissingDependency, Unsupported
from kernelcat.reference import _flashinfer_moe, _quack_moe, _tile_race
from kernelcat.reference.moe_gemm import product
from kernelcat.reference.moe_mlp import layer

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

OAI = {"activation": "swiglu_oai"}
FEW = layer(40, 3, 6, 160, 96)  # 20 rows an expert, 6 experts: no power of two
SKEWED = layer(70, 4, 5, 96, 64, skew="hot", logit_dtype="bfloat16", **OAI)
MANY = layer(260, 2, 4, 64, 32, **OAI)  # 130 rows an expert
ONE = layer(1, 2, 8, 64, 32)
UP = product(50, 3, 5, 128, 96, gather=True, bias=True, **OAI)
DOWN = product(50, 3, 5, 96, 64, combine=True, bias=True)
PLAIN = product(40, 2, 6, 64, 96, activation="swiglu", skew="zipf")

CASES = {
    f"{name}-{number}": ("moe_mlp", name, {}, dict(problem.axes), "judge_peer")
    for name in ("flashinfer", "quack")
    for number, problem in enumerate((FEW, SKEWED, MANY, ONE))
} | {
    f"moe_gemm-{number}": ("moe_gemm", "quack", {}, dict(problem.axes), "judge_peer")
    for number, problem in enumerate((UP, DOWN, PLAIN))
}


def test_results_pass_the_gate(interpreted: Callable) -> None:
    """Also those of a second copy of the arrays, which takes the tiles that the first one raced."""
    results = interpreted(CASES, "from fake_moe_peers import judge_peer")
    assert {name: result[2] for name, result in results.items() if not result[1]} == {}
    # Of FlashInfer's 11 candidates for 56 rows an expert, 5 have tiles of 128 rows and 6 of 64.
    assert {name: result[0] for name, result in results.items()} == {
        "flashinfer-0": 6, "flashinfer-1": 11, "flashinfer-2": 5, "flashinfer-3": 5,
        **{f"quack-{number}": 6 for number in range(4)},
        **{f"moe_gemm-{number}": 3 for number in range(3)},
    }  # fmt: skip


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Empty modules in the place of the libraries, on a fake Hopper GPU."""
    names = ["triton_kernels", "triton_kernels.topk", "quack", "quack.gemm_config"]
    parts = _flashinfer_modules()
    for name in (*names, *parts):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["triton_kernels.topk"].topk_forward = None
    for name in parts[-2:]:
        setattr(sys.modules[name], name.rpartition(".")[2], None)
    epilogues = SimpleNamespace(EPILOGUES={})
    monkeypatch.setitem(sys.modules, "kernelcat.reference._quack_epilogues", epilogues)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return monkeypatch


def _flashinfer_modules() -> list[str]:
    folder = "flashinfer.fused_moe.cute_dsl"
    files = ("gather_grouped_gemm_act_fusion", "grouped_gemm_finalize_fusion")
    packages = ["flashinfer", "flashinfer.fused_moe", folder]
    return packages + [f"{folder}.sm90_contiguous_{file}" for file in files]


def make(name: str, entry: str = "moe_mlp") -> Callable:
    return next(peer for peer in catalog.entry(entry).peers if peer.name == name).load()


@pytest.mark.parametrize("name", ["flashinfer", "quack"])
@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"format": "mxfp4"}, "with weights in bfloat16, float16"),
        ({"bias": True}, "bias is False"),
        ({"residual": True}, "residual is False"),
        ({"score": "sigmoid"}, "score is softmax"),
        ({"renormalize": False}, "renormalize is True"),
        ({"scaling": 2.5}, "scaling 1"),
        ({"tokens": 0}, "at least one token"),
    ],
)
def test_declined_problems_of_moe_mlp(
    name: str, axes: dict, reason: str, planted: pytest.MonkeyPatch
) -> None:
    problem = catalog.entry("moe_mlp").problem(**{**FEW.values, **axes})
    with pytest.raises(Unsupported, match=f"{name} is raced .*{reason}"):
        make(name)(problem, {})


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"format": "fp8"}, "in 16 bits"),
        ({"residual": True, "combine": True}, "without residual"),
        ({"N": 120}, "a multiple of 16 bytes"),
        ({"tokens": 0}, "at least one token"),
    ],
)
def test_declined_problems_of_moe_gemm(
    axes: dict, reason: str, planted: pytest.MonkeyPatch
) -> None:
    problem = catalog.entry("moe_gemm").problem(**{**UP.values, **axes})
    with pytest.raises(Unsupported, match=f"quack is raced .*{reason}"):
        make("quack", "moe_gemm")(problem, {})


def test_flashinfer_needs_whole_blocks_of_columns(planted: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="inter is a multiple of 32"):
        make("flashinfer")(layer(40, 3, 6, 160, 80), {})


@pytest.mark.parametrize("name", ["flashinfer", "quack"])
def test_other_gpus_than_hopper_are_declined(name: str, planted: pytest.MonkeyPatch) -> None:
    planted.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(Unsupported, match=f"{name} is raced on Hopper .*, not on sm_100"):
        make(name)(FEW, {})


@pytest.mark.parametrize(
    ("entry", "name", "module", "package"),
    [
        ("moe_mlp", "flashinfer", "flashinfer", "flashinfer-python"),
        ("moe_mlp", "quack", "quack", "quack-kernels"),
        ("moe_gemm", "quack", "quack", "quack-kernels"),
    ],
)
def test_the_error_of_a_missing_peer_names_the_command_that_installs_it(
    entry: str, name: str, module: str, package: str, planted: pytest.MonkeyPatch
) -> None:
    for loaded in [n for n in sys.modules if n.partition(".")[0] == module]:
        planted.delitem(sys.modules, loaded)
    planted.delitem(sys.modules, "kernelcat.reference._quack_epilogues")
    planted.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependency, match=f"the peer {name} needs: pip install {package}"):
        make(name, entry)


# ---- the race of tiles --------------------------------------------------------------------------


def test_the_fastest_tile_wins_and_late_ones_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = []

    def build(us: float) -> Callable[[list], None]:
        built.append(us)
        return lambda times: times.append(us)

    def median_us(run: Callable) -> float:
        run()
        return times[-1]

    times: list[float] = []
    monkeypatch.setattr(_tile_race, "median_us", median_us)
    race = _tile_race.fastest((3.0, 1.0, 2.0), build, (times,), _tile_race.deadline())
    assert (race.us, race.candidate, built) == (1.0, 1.0, [3.0, 1.0, 2.0])
    late = _tile_race.deadline() - _tile_race.SECONDS
    assert _tile_race.fastest((3.0, 1.0), build, (times,), late).candidate == 3.0


def test_candidates_are_legal() -> None:
    """FlashInfer: columns of the second product above 128 only with 128 rows, clusters even.

    QuACK: accumulators of at most 256 x 128, and two alternating warpgroups of 128 x 208.
    """
    for tile_m in (64, 128):
        for hidden in (64, 2048, 2880):
            for (m, n), cluster in _flashinfer_moe.down_tiles(tile_m, hidden):
                assert m == tile_m and n <= 2 * tile_m
                assert cluster == (1, 1) or -(-hidden // n) % 2 == 0
    for m, n, pingpong, _ in _quack_moe.FEW + _quack_moe.MANY:
        assert m * n <= (128 * 208 if pingpong else 256 * 128) and n % 32 == 0
