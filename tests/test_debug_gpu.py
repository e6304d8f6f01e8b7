"""``kernelcat.debug`` on a GPU: what real launches of torch and CuPy arrays are answered."""

from __future__ import annotations

from typing import Any

import pytest

import kernelcat
from kernelcat.errors import InvalidArgument

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:there is no tuning database"),
]

WRONG = r"^paged_attn: block_table\[1, 0\] = 999: the cache has 4 pages$"


def attention() -> list[torch.Tensor]:
    """Two sequences of 5 and 3 tokens with a query each, in pages of 16 tokens, 4 pages."""
    numbers = ([[3, -7], [0, 999]], [5, 3], [0, 1, 2])
    shapes = ((2, 2, 64), (4, 16, 1, 64), (4, 16, 1, 64))
    values = [torch.randn(shape, device="cuda").half() for shape in shapes]
    return values + [torch.tensor(n, device="cuda", dtype=torch.int32) for n in numbers]


def of_library(library: str, arrays: list[torch.Tensor]) -> list[Any]:
    if library == "torch":
        return arrays
    cupy = pytest.importorskip("cupy")
    return [cupy.from_dlpack(array) for array in arrays]


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_wrong_page_is_refused_and_a_right_one_is_not(library: str) -> None:
    attend, arrays = kernelcat.get("paged_attn"), of_library(library, attention())
    bound = attend.bind(*arrays)
    with kernelcat.debug():
        attend(*arrays)
        bound()
        arrays[3][1, 0] = 999
        with pytest.raises(InvalidArgument, match=WRONG):
            attend(*arrays)
        with pytest.raises(InvalidArgument, match=WRONG):
            bound()
    torch.cuda.synchronize()  # nothing was launched that could have failed


def test_what_the_stream_has_yet_to_write_is_checked() -> None:
    """The check waits for the stream of the call, which is not the default one."""
    attend, arrays = kernelcat.get("paged_attn"), attention()
    attend(*arrays)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), kernelcat.debug():
        torch.cuda._sleep(100_000_000)
        arrays[3][1, 0] = 999
        with pytest.raises(InvalidArgument, match=WRONG):
            attend(*arrays)
    torch.cuda.synchronize()


def test_a_capture_is_refused_and_works_when_the_check_is_off() -> None:
    attend, arrays = kernelcat.get("paged_attn"), attention()
    attend(*arrays)
    torch.cuda.synchronize()
    with (
        kernelcat.debug(),
        pytest.raises(InvalidArgument, match="turn it off to capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        attend(*arrays)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(*arrays)
    graph.replay()
    torch.cuda.synchronize()
