"""Results of models: from a file of `moe bench --out` to a line, and to README's sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kernelcat.cli import main
from kernelcat.report import engine
from kernelcat.store import model_results
from kernelcat.store.model_results import ModelResult


def row(name: str, batch: int, rate: float) -> dict[str, Any]:
    return {"engine": name, "batch": batch, "context": 512, "tokens_per_second": rate}


def out(*decoding: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What `moe bench --out` writes."""
    return {
        "model": "m", "has_random_weights": True, "decoding": list(decoding), "prefill": None,
        "loads": [], "profiles": [], **more,
    }  # fmt: skip


def result(command: str, content: dict[str, Any], **more: Any) -> ModelResult:
    return replace(ModelResult.of("h200", command, "2026-11-24", content), **more)


def test_every_shipped_result_says_what_ran_and_names_no_machine() -> None:
    folder = model_results.shipped_folder()
    results = model_results.read(folder)
    assert {r.model for r in results} >= {"gpt-oss-20b", "gpt-oss-120b", "deepseek-v3-4-layers"}
    for each in results:
        assert each.command.startswith("kernelcat moe ") and each.commit and each.created_at
        assert ModelResult.from_json(each.to_json()) == each
    text = "".join(path.read_text() for path in folder.glob("*.jsonl"))
    assert not [word for word in ("/tmp", "/home", "/root", "127.0.0.1", 'trace":') if word in text]


def test_the_command_keeps_a_file_without_addresses_and_places(tmp_path: Path) -> None:
    file, folder = tmp_path / "run.json", tmp_path / "models"
    content = out(
        row("kernelcat", 1, 2.0), url="http://host:1", profiles=[{"batch": 1, "trace": "/x/t.json"}]
    )
    file.write_text(json.dumps(content))
    command = ["moe", "results", str(file), "--gpu", "h200", "--command", "c", "--folder",
               str(folder), "--commit", "abc", "--version", "transformers=5.17"]  # fmt: skip
    for date in ("2026-11-23", "2026-11-24"):  # the second one replaces the first one
        done = CliRunner().invoke(main, [*command, "--date", date])
        assert done.exit_code == 0, done.output
    [kept] = model_results.read(folder)
    assert (kept.created_at, kept.commit, kept.is_served) == ("2026-11-24", "abc", True)
    assert kept.versions == {"transformers": "5.17"}
    assert kept.measured["profiles"] == [{"batch": 1}]
    assert kept.measured["decoding"] == content["decoding"]
    assert "host" not in (folder / "nvidia-h200.jsonl").read_text()


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [("{", (), "is no JSON"), ("{}", (), "no file that"), ("[]", (), "no file that"),
     (json.dumps(out()), ("--version", "5"), "must be PACKAGE=VERSION")],
)  # fmt: skip
def test_another_file_is_refused(
    text: str, more: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    command = ["moe", "results", str(file), "--gpu", "h200", "--command", "c", "--date", "d"]
    done = CliRunner().invoke(main, [*command, "--folder", str(tmp_path), *more])
    assert done.exit_code == 1 and message in done.output
    assert not list(tmp_path.glob("*.jsonl"))


def test_the_sentence_has_peers_the_best_prefill_and_the_load_by_http() -> None:
    load = {"metrics": {"num_complete": 9, "output_throughput": 1234.4}}
    results = [
        result("a", out(*(row("kernelcat", batch, 100.0) for batch in (1, 2, 4)))),
        result("b", out(
            row("transformers", 1, 3.2), row("transformers", 8, 40.0), row("kernelcat", 8, 3000.4),
            row("kernelcat", 1, 60.6), prefill={"num_tokens": 4096, "ms": 99.0},
        ), versions={"transformers": "5.17"}),
        result("c", out(prefill={"num_tokens": 8192, "ms": 142.0})),
        result("d", out(prefill={"num_tokens": 8192, "ms": 109.1})),
        result("e", out(loads=[load], url="http://host")),
        result("f", out(row("kernelcat", 1, 9e9)), gpu="h100"),
        result("g", out(row("kernelcat", 1, 9e9), model="other")),
    ]  # fmt: skip
    assert engine.markdown(results, "h200", "m").splitlines() == [
        "On one NVIDIA H200, with random weights at the size of m (context 512), it writes 61 "
        "tokens a second at batch 1 and 3,000 at 8, where transformers 5.17 (in the same run) "
        "writes 3 and 40.",
        "A prompt of 8,192 tokens takes 109 ms.",
        "9 requests by HTTP get 1,234 tokens a second.",
    ]


def test_the_sentence_compares_two_gpus_with_one_at_the_same_commit() -> None:
    def at(commit: str, gpu: str, *rows: dict[str, Any], **more: int) -> ModelResult:
        return replace(result(f"{commit} {gpu} {more}", out(*rows, **more), gpu=gpu), commit=commit)

    results = [
        at("1", "h200", row("kernelcat", 1, 100.0), row("kernelcat", 8, 400.0)),
        at("2", "h200", row("kernelcat", 1, 1.0), row("kernelcat", 256, 1000.0)),
        at("1", "h200x2-nvlink", row("kernelcat", 1, 130.0), row("kernelcat", 8, 600.0), tp=2),
        at("2", "h200x2-nvlink", row("kernelcat", 256, 1700.0), row("kernelcat", 9, 9.0), ep=2),
        at("1", "h100x2-nvlink", row("kernelcat", 1, 9e9), tp=2),
    ]
    assert engine.markdown(results, "h200", "m").splitlines()[-1] == (
        "Two GPUs write 1.30 times as many tokens at batch 1 and 1.50 at 8 (`--tp 2`), "
        "1.70 at 256 (`--ep 2`)."
    )


def test_without_results_nothing_is_said() -> None:
    assert engine.markdown([], "h200", "m") == "Nothing measured yet.\n"
