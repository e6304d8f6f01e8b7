"""Checkpoints whose index or header was made to do harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcat.errors import InvalidArgument
from kernelcat.layers.checkpoint import INDEX, Checkpoint


def shard(path: Path, header: Any = None, data: bytes = b"\0" * 4) -> Path:
    """Write a safetensors file with one float32 called w, or with another header."""
    w = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    text = json.dumps(w if header is None else header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/secret.safetensors", "a/../../b", "\0"]
)
def test_an_index_that_names_a_file_outside_of_its_folder_is_refused(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    secret = shard(tmp_path / "secret.safetensors")
    name = str(secret) if name.startswith("/") else name
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(InvalidArgument, match="a file outside of its folder"):
        _ = Checkpoint(folder).tensors


def test_shards_may_be_links_as_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model-00001.safetensors").symlink_to(shard(tmp_path / "blob"))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "model-00001.safetensors"}}))
    assert list(Checkpoint(folder).tensors) == ["w"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000, "\udcff"])
def test_a_broken_index_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidArgument, match="is no index of safetensors files") as caught:
        _ = Checkpoint(tmp_path).tensors
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)
FIELDS = st.fixed_dictionaries({"dtype": JSON, "shape": JSON, "data_offsets": JSON})


@given(header=JSON | st.dictionaries(st.text(max_size=5), FIELDS | JSON, max_size=3))
def test_any_header_is_read_or_refused(tmp_path_factory: Any, header: Any) -> None:
    path = shard(tmp_path_factory.mktemp("x") / "m.safetensors", header)
    try:
        for tensor in Checkpoint(path).tensors.values():
            assert tensor.end <= path.stat().st_size
    except InvalidArgument as error:
        assert "\n" not in str(error)
