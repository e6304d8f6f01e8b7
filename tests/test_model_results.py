"""Results of models: from a file of `moe bench --out` to a line, and to README's sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kernelcat.cli import main
from kernelcat.report import engine, engine_page
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


def fetched(**changes: Any) -> dict[str, Any]:
    """What `moe bench --fetch` measures."""
    return {
        "num_tokens": 4096, "recomputed_ms": 69.62, "shared_ms": 8.91, "fetched_ms": 14.95,
        "speedup": 4.657, "num_bytes": 103_809_024, "bandwidth": 43.15e9, **changes,
    }  # fmt: skip


def beside_prompts(name: str, p99: float, batch: int = 32, **changes: Any) -> dict[str, Any]:
    """What `moe bench --disaggregate` measures of an engine."""
    traffic = {"batch": batch, "context": 1024, "num_tokens": 2048, "prompt_tokens": 8192,
               "rate": 4.0}  # fmt: skip
    return {
        "engine": name, "traffic": traffic, "idle_ms": {"p50": 5.98, "p99": 12.0},
        "loaded_ms": {"p50": 6.41, "p99": p99}, "prompt_ms": {"p50": 170.32}, "ratio": p99 / 12.0,
        **changes,
    }  # fmt: skip


def apart(*runs: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What `moe bench --disaggregate --out` writes."""
    both = [beside_prompts("colocated", 42.68), beside_prompts("disaggregated", 11.87)]
    return {"model": "m", "has_random_weights": True, "interference": list(runs) or both, **more}


def result(command: str, content: dict[str, Any], gpu: str = "h200", **more: Any) -> ModelResult:
    return replace(ModelResult.of(gpu, command, "2026-11-24", content), **more)


def test_every_shipped_result_says_what_ran_and_names_no_machine() -> None:
    folder = model_results.shipped_folder()
    results = model_results.read(folder)
    assert {r.model for r in results} >= {"gpt-oss-20b", "gpt-oss-120b", "deepseek-v3-4-layers"}
    for each in results:
        assert each.command.startswith("kernelcat moe ") and each.commit and each.created_at
        assert ModelResult.from_json(each.to_json()) == each
    assert {"decoding", "prefill", "fetch", "interference", "loads"} <= {
        part for each in results for part, value in each.measured.items() if value
    }
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


def test_the_command_keeps_what_prompts_cost_requests_that_write(tmp_path: Path) -> None:
    file, folder = tmp_path / "run.json", tmp_path / "models"
    file.write_text(json.dumps(apart()))
    command = ["moe", "results", str(file), "--gpu", "h100x2-nvlink", "--command", "c", "--folder",
               str(folder), "--commit", "abc", "--date", "2026-11-26"]  # fmt: skip
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    [kept] = model_results.read(folder)
    assert (folder / "nvidia-h100x2-nvlink.jsonl").exists()
    assert (kept.gpu, kept.command, kept.commit, kept.created_at) == (
        "h100x2-nvlink", "c", "abc", "2026-11-26",
    )  # fmt: skip
    assert kept.measured == {key: value for key, value in apart().items() if key != "model"}


SHORT = apart(*apart()["interference"], beside_prompts("colocated", 50.0, batch=128))
NO_TIME = apart(beside_prompts("colocated", 42.0, loaded_ms={"p50": 6.0}))


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [("{", (), "is no JSON"), ("{}", (), "no file that"), ("[]", (), "no file that"),
     (json.dumps({"model": "m", "rungs": []}), (), "no file that"),
     (json.dumps(out()), ("--version", "5"), "must be PACKAGE=VERSION"),
     (json.dumps(apart()), (), "h200 is one GPU, and --disaggregate takes two: h200x2-nvlink"),
     (json.dumps(SHORT), (), "batch 128 has no times of disaggregated: the run has ended early"),
     (json.dumps(NO_TIME), (), "interference must have the times of engines"),
     (json.dumps(apart() | {"interference": []}), (), "interference must have the times"),
     (json.dumps(apart() | {"interference": [3]}), (), "interference must have the times"),
     (json.dumps(out(fetch=fetched(fetched_ms=None))), (), "fetch must have the numbers"),
     (json.dumps(out(fetch=[1])), (), "fetch must have the numbers")],
)  # fmt: skip
def test_another_file_is_refused(
    text: str, more: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    command = ["moe", "results", str(file), "--gpu", "h200", "--command", "c", "--date", "d"]
    done = CliRunner().invoke(main, [*command, "--folder", str(tmp_path), *more])
    assert done.exit_code == 1 and message in done.output and done.output.count("\n") == 1
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


def test_the_sentence_says_what_prompts_cost_at_the_largest_batch_of_the_newest_run() -> None:
    runs = [*apart()["interference"], beside_prompts("colocated", 99.0, 64),
            beside_prompts("disaggregated", 21.2, 64)]  # fmt: skip
    pair = "h100x2-nvlink"
    results = [
        result("a", out(row("kernelcat", 1, 100.0))),
        result("b", apart(*runs), pair),
        result("c", apart(), pair, created_at="2026-11-23"),
        result("d", apart(model="other"), pair, created_at="2026-11-25"),
    ]
    assert engine.markdown(results, "h200", "m").splitlines()[-1] == (
        "While prompts of 8,192 tokens arrive, 99 % of the times between tokens of 64 requests are "
        "below 21 ms where one GPU computes prompts and a second one writes (`--disaggregate`), "
        "99 ms where one does both (2 x NVIDIA H100 SXM5, nvlink; "
        "[tables](docs/results/engine.md))."
    )


def test_without_results_nothing_is_said() -> None:
    assert engine.markdown([], "h200", "m") == "Nothing measured yet.\n"


def test_the_page_has_a_table_of_fetches_and_one_of_prompts_beside_decoding() -> None:
    silent = beside_prompts("colocated", 42.68, prompt_ms=None)
    both = apart(beside_prompts("disaggregated", 11.87), silent)
    page = engine_page.markdown(
        [
            result("bench --fetch", out(fetch=fetched()), commit="abc", model="<b>m"),
            result("bench --disaggregate", both, gpu="h100x2-nvlink"),
            result("bench", out(row("kernelcat", 1, 100.0))),
        ]
    )
    fetch, prompts = page.split("\n## ")[1:]
    assert "### &lt;b>m on NVIDIA H200\n\n2026-11-24, commit abc, random weights." in fetch
    assert "| 4,096 tokens | 14.95 | 69.62 | 4.66 | 8.91 | 103.8 | 43.1 |" in fetch
    assert "`bench --fetch`: " in fetch and fetch.count("| --- |") == 1
    assert "### m on 2 x NVIDIA H100 SXM5, nvlink\n\n2026-11-24, random weights." in prompts
    assert [line for line in prompts.splitlines() if line.startswith(("| col", "| dis"))] == [
        "| colocated | 32 | 5.98 | 12.00 | 6.41 | 42.68 | 3.56 |  |",
        "| disaggregated | 32 | 5.98 | 12.00 | 6.41 | 11.87 | 0.99 | 170.3 |",
    ]
    assert "4 prompts of 8,192 tokens a second" in prompts


def test_a_table_without_results_is_left_out_of_the_page() -> None:
    page = engine_page.markdown([result("a", out(fetch=fetched()))])
    assert page.count("\n## ") == 1 and "Nothing measured" not in page
    assert engine_page.markdown([result("a", out())]).endswith("\nNothing measured yet.\n")
