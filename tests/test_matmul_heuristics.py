"""nvMatmulHeuristics beside gemm's cost models, judged by the shipped races."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.cli import main
from kernelcat.reference.gemm import product
from kernelcat.report import matmul_heuristics
from kernelcat.report.matmul_heuristics import KERNELS, Model, Shape
from kernelcat.report.predictions import races_of
from kernelcat.store import shipped


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (Config(tile="128x192", cluster="1x2", split_k=2, swap=False), ((128, 192, 64), (1, 2), 2)),
        (Config(tile="128x16", cluster="1x2", split_k=1, swap=True), ((16, 128, 64), (2, 1), 1)),
        (Config(tile="64x128x32", split_k=4, stages=3), ((64, 128, 32), (1, 1), 4)),
        (Config(block_m=128, block_n=176, cluster="2x1"), ((128, 176, 64), (2, 1), 1)),
    ],
)
def test_a_configuration_is_described_by_its_tile_cluster_and_splits(config, shape) -> None:
    assert Shape.of(config) == Shape(*shape)


def test_every_raced_configuration_of_the_modelled_kernels_is_described() -> None:
    entry = catalog.entry("gemm")
    races = matmul_heuristics.modelled(races_of(entry, "h200", shipped()))
    assert len(races) > 20
    for times in races.values():
        assert {name.partition("/")[2] for name, _ in times} <= set(KERNELS)
        assert all(min(Shape.of(config).tile) > 0 for _, config in times)


def test_the_model_knows_that_more_work_and_tiles_of_few_rows_take_longer() -> None:
    pytest.importorskip(matmul_heuristics.MODULE)
    model, wide = Model("h200"), Shape((128, 256, 64))
    small, large = (model.us(product(size, size, size), wide) for size in (2048, 8192))
    assert 1000 < large < 2000 and small < large / 20  # the peak rate makes 1,111 us of the large
    assert model.us(product(8192, 8192, 8192), Shape((64, 64, 64))) > 1.2 * large


def test_the_audit_of_gemm_has_a_line_for_it_where_it_is_installed() -> None:
    pytest.importorskip(matmul_heuristics.MODULE)
    table = CliRunner().invoke(main, ["predict", "--audit", "gemm"]).stdout
    assert "Models of gemm on the h200" in table and "\nnvMatmulHeuristics " in table
    others = CliRunner().invoke(main, ["predict", "--audit", "fp8_gemm"]).stdout
    assert "Models of" not in others


def test_without_the_package_the_audit_is_as_it_is(monkeypatch) -> None:
    monkeypatch.setattr(matmul_heuristics, "MODULE", "a_module_that_is_not_installed")
    done = CliRunner().invoke(main, ["predict", "--audit", "gemm"])
    assert done.exit_code == 0 and "Models of" not in done.stdout
