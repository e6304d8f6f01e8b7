"""The examples run: unchanged on a GPU, elsewhere with oracles instead of kernels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

import torch
from oracle_operator import OracleOperator

import kernelcat
from kernelcat import catalog
from kernelcat.errors import InvalidArgument

FOLDER = Path(__file__).parent.parent / "examples"
LINE = re.compile(r"^(?:prefill|step \d+): largest difference from torch (\d\.\d+)$", re.MULTILINE)


def load(name: str) -> ModuleType:
    """The example's module, freshly imported."""
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differences(printed: str, steps: int) -> list[float]:
    """The differences that an example prints: of the prefill and of each of ``steps`` steps."""
    numbers = [float(number) for number in LINE.findall(printed)]
    assert len(numbers) == 1 + steps, printed
    return numbers


PROMPTS = {"paged_attention": (70, 33, 1, 16), "mla_decode": (100, 33, 1, 64)}
"""Shorter prompts for the test without a GPU."""
ALLOWED = 0.04
"""The largest difference from torch that is allowed."""


@pytest.mark.parametrize("name", PROMPTS)
def test_an_example_with_oracles(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load(name)
    monkeypatch.setattr(kernelcat, "get", OracleOperator)
    monkeypatch.setattr(example, "capture", lambda step: step)
    monkeypatch.setattr(example, "PROMPTS", PROMPTS[name])
    monkeypatch.setattr(example, "MAX_TOKENS", 128)
    example.main()
    assert max(differences(capsys.readouterr().out, example.STEPS)) < ALLOWED


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROMPTS)
def test_an_example_on_a_gpu(name: str) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(differences(done.stdout, load(name).STEPS)) < ALLOWED


SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
TOKENS = re.compile(r"^the same next token after the same text: (\d+) of (\d+)$", re.MULTILINE)


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example of transformers with a small model in float32 and oracles instead of kernels."""
    pytest.importorskip("transformers")
    example = load("transformers_model")
    monkeypatch.setattr(kernelcat, "get", OracleOperator)
    for name, value in {"CONFIG": SMALL, "DTYPE": torch.float32, "BATCH": 2, "PROMPT": 20,
                        "NEW_TOKENS": 15}.items():  # fmt: skip
        monkeypatch.setattr(example, name, value)
    return example


def test_a_model_of_transformers_writes_the_same_tokens(
    small_model: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    small_model.main()
    assert TOKENS.findall(capsys.readouterr().out) == [("30", "30")]


def test_the_example_compares_tokens_that_a_wrong_length_changes(
    small_model: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = small_model.Pages.attention

    def forgets(pages, *arguments, **options):
        pages.length -= 5
        return attention(pages, *arguments, **options)

    monkeypatch.setattr(small_model.Pages, "attention", forgets)
    small_model.main()
    ((equal, total),) = TOKENS.findall(capsys.readouterr().out)
    assert int(equal) < int(total)


@pytest.mark.gpu
def test_a_model_of_transformers_on_a_gpu() -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, str(FOLDER / "transformers_model.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ((equal, total),) = TOKENS.findall(done.stdout)
    assert int(equal) > 0.75 * int(total)  # bfloat16: a near tie may go the other way
    assert "tokens/s, with the catalog: " in done.stdout


OWN = {**os.environ, "KERNELCAT_ENTRIES": str(FOLDER / "own_package")}
"""The environment in which the command line has the entry of the example's package."""


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, env=OWN
    )


def test_an_entry_of_ones_own_package_is_listed_and_passes_the_check() -> None:
    listed = json.loads(python("-m", "kernelcat", "list", "--json").stdout)
    (own,) = [row for row in listed if row["entry"] == "squared_relu"]
    assert own["languages"] == ["triton"]
    done = python("-m", "kernelcat", "check", "squared_relu", "--json")
    (outcome,) = json.loads(done.stdout)
    assert outcome["fuzz_examples"] > 0 and not outcome["failures"]


def test_new_files_in_a_folder_of_ones_own_compile_in_every_language(tmp_path: Path) -> None:
    options = ("--language", "cuda", "--language", "triton", "--language", "cute")
    made = python(
        "-m", "kernelcat", "new", "own_sum", "--folder", str(tmp_path), *options, "--json"
    )
    assert all((tmp_path / file).is_file() for file in json.loads(made.stdout)["files"])
    inspect = [sys.executable, "-m", "kernelcat", "inspect", "own_sum", "--gpu", "h200", "--json"]
    done = subprocess.run(inspect, capture_output=True, text=True, check=False,
                          env={**os.environ, "KERNELCAT_ENTRIES": str(tmp_path)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert [report["implementation"] for report in reports] == [
        f"own_sum/{language}/naive" for language in ("cuda", "triton", "cute")
    ]


def test_importing_the_package_adds_its_entry() -> None:
    code = (
        "import sys; sys.path[:0] = [FOLDER, TESTS]\n"
        "import kernelcat; from kernelcat import catalog, paths\n"
        "paths._own.clear(); catalog.names.cache_clear(); before = catalog.names()\n"
        "assert 'squared_relu' not in before and catalog.entry('gemm')\n"
        "import kernelcat.reference, kernelcat.kernels\n"
        "kernelcat.reference.__path__[1:] = kernelcat.kernels.__path__[1:] = []\n"
        "from oracle_operator import OracleOperator\n"
        "import own_entry; kernelcat.get = OracleOperator; own_entry.main()\n"
        "assert set(catalog.names()) - set(before) == {'squared_relu'}\n"
        "assert [i.name for i in catalog.implementations('squared_relu')] == "
        "['squared_relu/triton/naive']\n"
    )
    code = code.replace("FOLDER", repr(str(FOLDER))).replace(
        "TESTS", repr(str(Path(__file__).parent))
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.07  # half a step of bfloat16 below 16 to 32


def test_a_folder_without_specifications_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no folder reference"):
        catalog.add_entries(tmp_path)


@pytest.mark.gpu
def test_an_entry_of_ones_own_package_on_a_gpu() -> None:
    done = python(str(FOLDER / "own_entry.py"))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.07  # half a step of bfloat16 below 16 to 32


class PlantedNorm:
    """vLLM's RMSNorm as far as the example uses it."""

    variance_size_override = None

    def __init__(self, hidden: int, eps: float) -> None:
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.rand(hidden).bfloat16()), eps

    def forward_cuda(self, x, residual=None):
        return "vLLM's own"


def test_the_operator_for_vllm_computes_what_vllm_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = {}

    class CustomOp:
        @staticmethod
        def register_oot(name):
            return lambda cls: registered.setdefault(name, cls)

    for module, attribute, value in (("custom_op", "CustomOp", CustomOp),
                                     ("layers.layernorm", "RMSNorm", PlantedNorm)):  # fmt: skip
        planted = ModuleType(f"vllm.model_executor.{module}")
        setattr(planted, attribute, value)
        monkeypatch.setitem(sys.modules, planted.__name__, planted)
    for package in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setattr(kernelcat, "get", OracleOperator)
    load("vllm_rms_norm").register()
    norm = registered["RMSNorm"](256, 1e-6)
    x, residual = torch.randn(2, 3, 256).bfloat16(), torch.randn(2, 3, 256).bfloat16()

    def expected(h):
        return torch.nn.functional.rms_norm(h, (256,), norm.weight, 1e-6)

    torch.testing.assert_close(norm.forward_cuda(x), expected(x), atol=0.02, rtol=0.01)
    sums = x + residual
    y, updated = norm.forward_cuda(x, residual)
    assert updated is residual
    torch.testing.assert_close(residual, sums)
    torch.testing.assert_close(y, expected(sums), atol=0.02, rtol=0.01)
    assert norm.forward_cuda(x.float()) == "vLLM's own"
