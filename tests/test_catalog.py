"""The catalog: discovery by file name, and errors that name the nearest entry."""

from __future__ import annotations

import sys
from random import Random

import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import LANGUAGES
from kernelcat.catalog.random_problems import draw
from kernelcat.errors import MissingDependency, UnknownName
from kernelcat.runtime.gpu import SKUS


def test_the_entries_are_the_files() -> None:
    assert {"gemm", "tma_copy"} <= set(catalog.names())


IN_TWO_LANGUAGES = {
    *("embedding", "lm_head", "out_router", "qkv_rope_write", "rms_norm", "sample"),
    *("kv_transfer", "moe_combine"),
}
"""Kernels of a decoder around attention and experts, and exchanges, which need no more."""


@pytest.mark.parametrize("name", catalog.complete())
def test_every_complete_entry_has_its_languages_and_a_ladder(name: str) -> None:
    languages, least = catalog.languages(name), 1 if catalog.entry(name).ranks else 2
    assert languages == LANGUAGES or (name in IN_TWO_LANGUAGES and len(languages) == 2)
    for language in languages:
        implementations = catalog.in_language(name, language)
        assert len({i.variant for i in implementations}) == len(implementations) >= least
        assert all((i.entry, i.language) == (name, language) for i in implementations)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: catalog.entry("gem"), "did you mean gemm"),
        (lambda: catalog.in_language("gemm", "tritn"), "did you mean triton"),
        (lambda: catalog.implementation("gemm", "cuda", "wgma"), "did you mean wgmma"),
        (lambda: catalog.entry("gemm").named("4096x4096"), "did you mean 4096x4096x4096"),
    ],
)
def test_the_error_of_a_misspelt_name_suggests_the_nearest(call, message: str) -> None:
    with pytest.raises(UnknownName, match=message):
        call()


def test_the_error_of_a_missing_compiler_names_the_command_that_installs_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [m for m in sys.modules if m.startswith("kernelcat.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    catalog.in_language.cache_clear()
    try:
        with pytest.raises(MissingDependency, match=r"pip install 'kernelcat\[triton\]'"):
            catalog.in_language("gemm", "triton")
        languages = {i.language for i in catalog.implementations("gemm")}
        assert languages == {"cuda", "cute"}
    finally:
        catalog.in_language.cache_clear()


@pytest.mark.parametrize("name", ["gemm", "fp8_gemm"])
def test_what_is_hopeless_is_unpromising_for_every_problem(name: str) -> None:
    entry, h200, dice = catalog.entry(name), SKUS["h200"], Random(7)
    problems = draw(entry, "hopeless", 20)
    for each in catalog.implementations(name):
        hopeless = [config for config in each.whole_space() if each.hopeless(config)]
        if each.variant in ("wgmma", "fitted") and each.language == "cuda":
            assert hopeless, each.name
        for config in dice.sample(hopeless, min(len(hopeless), 400)):
            assert all(each.unpromising(config, problem, h200) for problem in problems), config
