"""Completion offers the names that exist; verbs name languages that are not installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from kernelcat import catalog
from kernelcat.catalog import discovery
from kernelcat.cli import completion, main
from kernelcat.runtime import driver, gpu


def offered(*words: str) -> list[str]:
    """What a shell is offered for the last word."""
    complete = BashComplete(main, {}, "kernelcat", completion.VARIABLE)
    return [item.value for item in complete.get_completions(list(words[:-1]), words[-1])]


def test_verbs_entries_gpus_and_languages_are_offered() -> None:
    assert offered("comp") == ["completion"]
    assert offered("db", "st") == ["stats"]
    assert offered("show", "nvfp4_") == [n for n in catalog.names() if n.startswith("nvfp4_")]
    for verb in ("tune", "explain", "leaderboard", "ladder", "check"):
        assert "gemm" in offered(verb, "ge"), verb
    for words in (("tune", "gemm"), ("db", "export", "x"), ("leaderboard",), ("build",)):
        assert offered(*words, "--gpu", "") == list(gpu.SKUS), words
    assert offered("check", "gemm", "--language", "t") == ["triton"]


def test_problems_and_variants_are_those_of_the_entry() -> None:
    problems = list(catalog.entry("gemm").problems)
    assert offered("explain", "gemm", "--problem", "") == problems
    assert offered("tune", "gemm", "--problem", "4096x4096x4") == [
        name for name in problems if name.startswith("4096x4096x4")
    ]
    variants = {i.variant for i in catalog.in_language("gemm", "cuda")}
    assert offered("inspect", "gemm", "--language", "cuda", "--variant", "") == sorted(variants)
    assert set(offered("check", "gemm", "--variant", "")) > variants
    assert offered("explain", "no_such_entry", "--problem", "") == []


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_shell_gets_its_script_and_the_line_that_installs_it(shell: str) -> None:
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0 and f"{completion.VARIABLE}={shell}_complete" in done.output
    text = CliRunner().invoke(main, ["completion", "--help"]).output
    assert completion.SHELLS[shell] in text


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_real_bash_completes(tmp_path: Path) -> None:
    program = tmp_path / "kernelcat"
    program.write_text(f"#!{sys.executable}\nfrom kernelcat.cli import main\n\nmain()\n")
    program.chmod(0o755)
    script = (
        f'PATH={tmp_path}:$PATH; eval "$(kernelcat completion bash)"; '
        "COMP_WORDS=(kernelcat show multi); COMP_CWORD=2; _kernelcat_completion kernelcat; "
        'echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["multicast_gemm"], done.stderr


@pytest.fixture
def only_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Triton and without a GPU."""
    monkeypatch.setattr(discovery, "installed", lambda module: module != "triton")
    discovery.in_language.cache_clear()
    monkeypatch.setattr(driver, "count", lambda: 0)


@pytest.mark.parametrize(
    "arguments",
    [
        "list",
        "show tma_copy",
        "inspect tma_copy --gpu h200 --problem 64KB",
        "explain tma_copy --problem 64KB --gpu h200",
        "check tma_copy",
        "fuzz tma_copy --examples 1",
        "bench tma_copy",
        "tune tma_copy --language triton",
        "check tma_copy --language triton",
        "profile tma_copy",
        "ladder tma_copy --measure --problem 64KB",
        "regret tma_copy --random 1",
        "build tma_copy --gpu h200 --language triton -o {folder}",
    ],
)
def test_every_verb_names_what_installs_a_missing_language(
    arguments: str, only_cuda: None, tmp_path: Path
) -> None:
    done = CliRunner().invoke(main, arguments.format(folder=tmp_path / "x").split())
    assert "pip install 'kernelcat[triton]'" in done.output, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)


def test_a_check_of_every_entry_names_a_missing_language_once(
    only_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "names", lambda: ("tma_copy", "gemm", "lm_head"))
    done = CliRunner().invoke(main, ["check", "--all"])
    assert done.exit_code == 1 and "without a GPU only Triton" in done.output
    assert " more cannot run here: " in done.output and len(done.output) < 600
    assert done.output.count("pip install 'kernelcat[triton]'") == 1
