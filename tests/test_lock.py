"""``kernelcat lock`` and ``kernelcat.use_lock``: exactly the kernels of a file, or one line.

Kernels are compiled for an H200 and loaded into the stand-in driver of `driver_recorder.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from driver_recorder import Recorder

import kernelcat
from kernelcat import catalog, store
from kernelcat.call import locking, operator
from kernelcat.catalog.implementation import Config
from kernelcat.cli import main
from kernelcat.errors import LockError, MissingDependency, StoreError, Unsupported
from kernelcat.jit import bundle, cuda
from kernelcat.runtime import code, driver, gpu
from kernelcat.store import workload
from kernelcat.store.workload import Use

H200 = gpu.SKUS["h200"]
pytestmark = pytest.mark.filterwarnings("ignore:there is no tuning database")
ENTRY = catalog.entry("rms_norm")
FIRST, SECOND = list(ENTRY.problems.values())[:2]
CUDA = catalog.in_language("rms_norm", "cuda")[0]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """An H200 whose driver only records, and no results but what a test adds to ``rows``."""
    recorder = Recorder()
    monkeypatch.setattr(driver, "opened", lambda: recorder)
    monkeypatch.setattr(code, "_functions", {})
    monkeypatch.setattr(code, "_of_sources", {})
    monkeypatch.setattr(operator, "_gpu", lambda index: H200)
    monkeypatch.setattr(locking, "_active", None)
    kernelcat.reload()
    yield recorder
    locking._active = None
    kernelcat.reload()


def a_use(problem: catalog.spec.Problem, why: str = "exact", name: str = "x/y/z", **config) -> Use:
    return Use("rms_norm", problem.values, "h200", name, config, why, 1.0, "measured", 1)


def written(tmp_path: Path, *uses: Use, code: int = 0) -> Path:
    path, file = tmp_path / "workload.jsonl", tmp_path / "kernelcat.lock"
    workload.add(path, uses or [a_use(FIRST)])
    arguments = ["lock", "--workload", str(path), "-o", str(file), "--json"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == code, done.output
    return file


def edit(file: Path, **fields: object) -> None:
    content = json.loads(file.read_text())
    content["locked"][0] |= fields
    file.write_text(json.dumps(content))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A lock of the first problem for the simplest CUDA C++ kernel, which no race chose."""
    file = written(tmp_path)
    config = CUDA.default(FIRST, H200)
    chosen = kernelcat.get("rms_norm").explain(gpu="h200", **FIRST.values).implementation
    assert chosen.name != CUDA.name
    code = locking.code_of(CUDA, FIRST, config, H200)
    edit(file, implementation=CUDA.name, config=dict(config), code=code)
    return file


def test_a_lock_has_what_dispatch_chooses_with_digests(tmp_path: Path) -> None:
    file = written(tmp_path, a_use(SECOND), a_use(FIRST), a_use(FIRST, "default"))
    items = store.lock.read(file)
    assert items.keys() == {("h200", FIRST), ("h200", SECOND)}
    for (sku, problem), item in items.items():
        expected = kernelcat.get("rms_norm").explain(gpu=sku, **problem.values)
        assert (item.implementation, item.config) == (expected.implementation.name, expected.config)
        chosen = expected.implementation
        assert item.code == locking.code_of(chosen, problem, item.config, H200)
        assert item.toolchain
    again = written(tmp_path)
    assert again.read_bytes() == file.read_bytes(), "a lock of the same choices is the same file"


def test_calls_and_explain_go_by_the_lock_and_by_the_database_without_it(
    file: Path, machine: Recorder
) -> None:
    op = kernelcat.get("rms_norm")
    before = op.plan(**FIRST.values).decision
    with kernelcat.use_lock(file):
        decision = op.plan(**FIRST.values).decision
        told = op.explain(gpu="h200", **FIRST.values)
    assert decision.implementation.name == told.implementation.name == CUDA.name
    assert (decision.why, decision.missed) == ("locked", False)
    assert "locked: the lock in use has this kernel" in str(told)
    assert machine.loaded
    after = op.plan(**FIRST.values).decision
    assert after.implementation.name == before.implementation.name != CUDA.name
    kernelcat.use_lock(file)
    assert op.plan(**FIRST.values).decision.why == "locked"
    kernelcat.use_lock(None)
    assert op.plan(**FIRST.values).decision.why == before.why


def test_other_problems_are_served_as_ever_and_told_or_refused(file: Path) -> None:
    op = kernelcat.get("rms_norm")
    usual = op.explain(gpu="h200", **SECOND.values)
    with kernelcat.use_lock(file):
        told = op.explain(gpu="h200", **SECOND.values)
        assert op.plan(**SECOND.values).decision.why == usual.why
        elsewhere = op.explain(gpu="h100", **FIRST.values)
    assert (told.implementation.name, told.config) == (usual.implementation.name, usual.config)
    assert f"not locked: {file} has no rms_norm" in str(told) and "not locked" not in str(usual)
    assert "on h100" in str(elsewhere.unlocked)
    with kernelcat.use_lock(file, strict=True):
        assert op.plan(**FIRST.values).decision.why == "locked"
        with pytest.raises(Unsupported, match=r"has no rms_norm .* on h200, and .*strict=True"):
            op.plan(**SECOND.values)


def test_a_pin_of_another_kernel_counts_more_than_the_lock(file: Path) -> None:
    pinned = kernelcat.get("rms_norm", language="triton")
    with kernelcat.use_lock(file, strict=True):
        told = pinned.explain(gpu="h200", **FIRST.values)
        assert kernelcat.get("rms_norm", language="cuda").explain(
            gpu="h200", **FIRST.values).why == "locked"  # fmt: skip
    assert told.implementation.language == "triton"
    assert "the call pins another" in str(told)


@pytest.mark.parametrize(("part", "what"), [(0, "launches"), (1, "machine code")])
def test_another_digest_is_one_line_and_nothing_is_loaded(
    file: Path, machine: Recorder, part: int, what: str
) -> None:
    parts = json.loads(file.read_text())["locked"][0]["code"].split(".")
    parts[part] = "0" * len(parts[part])
    edit(file, code=".".join(parts), toolchain="nvrtc 1.0")
    with kernelcat.use_lock(file), pytest.raises(LockError) as error:
        kernelcat.get("rms_norm").plan(**FIRST.values)
    message = str(error.value)
    assert f"is not as locked: other {what} (" in message and "by nvrtc 1.0; here " in message
    assert "\n" not in message and not machine.loaded


def test_other_source_is_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "OPTIONS", (*cuda.OPTIONS, "-maxrregcount=24"))
    with kernelcat.use_lock(file), pytest.raises(LockError, match="other machine code"):
        kernelcat.get("rms_norm").plan(**FIRST.values)


@pytest.mark.parametrize(
    "fields", [{"implementation": "rms_norm/cuda/gone"}, {"config": {"no_parameter": 1}}]
)
def test_a_kernel_that_is_gone_is_no_reason_for_another(file: Path, fields: dict) -> None:
    edit(file, **fields)
    with kernelcat.use_lock(file), pytest.raises(Unsupported, match="nothing serves"):
        kernelcat.get("rms_norm").plan(**FIRST.values)


def test_a_missing_compiler_is_no_reason_for_another_kernel(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise MissingDependency("CUDA C++ needs NVRTC")

    monkeypatch.setattr(locking, "code_of", missing)
    with kernelcat.use_lock(file), pytest.raises(MissingDependency, match="NVRTC"):
        kernelcat.get("rms_norm").plan(**FIRST.values)


def test_a_bundle_is_built_from_a_lock(file: Path, tmp_path: Path) -> None:
    arguments = ["build", "--gpu", "h200", "--lock", str(file), "-o", str(tmp_path / "kernels")]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert f"{CUDA.name} {dict(CUDA.default(FIRST, H200))} (locked)" in done.output
    built = bundle.read(tmp_path / "kernels").values()
    assert {artifact.language for artifact in built} == {"cuda"}
    edit(file, code="0.0")
    (tmp_path / "other").mkdir()
    arguments[-1] = str(tmp_path / "other")
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 1 and "is not as locked" in refused.output


def test_pins_are_left_out_and_what_cannot_be_locked_is_told(tmp_path: Path) -> None:
    config = dict(CUDA.default(SECOND, H200))
    pinned = a_use(SECOND, "forced", CUDA.name, **config)
    foreign = Use("no_entry", {"M": 1}, "h200", "a/b/c", {}, "exact", 1.0, "measured", 1)
    file = written(tmp_path, a_use(FIRST), pinned, foreign, code=1)
    assert store.lock.read(file).keys() == {("h200", FIRST)}


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"format": 2, "locked": []}', '{"format": 1, "locked": [{}]}', '{"format": 1}',
     '{"format": 1, "locked": [{"entry": "gemm", "problem": {"M": [1]}}]}'],
)  # fmt: skip
def test_a_file_that_is_no_lock_is_one_line_and_changes_nothing(
    tmp_path: Path, file: Path, text: str
) -> None:
    kernelcat.use_lock(file)
    other = tmp_path / "other.lock"
    other.write_text(text)
    for path in (other, tmp_path / "nowhere"):
        with pytest.raises(StoreError) as error:
            kernelcat.use_lock(path)
        assert "\n" not in str(error.value)
    why = kernelcat.get("rms_norm").explain(gpu="h200", **FIRST.values).why
    assert why == "locked"


def test_configurations_are_equal_whatever_the_order_of_their_keys(file: Path) -> None:
    config = CUDA.default(FIRST, H200)
    edit(file, config=dict(reversed(list(config.items()))))
    [item] = store.lock.read(file).values()
    assert item.config == Config(config)
