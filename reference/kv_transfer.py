"""`kv_transfer`: pages of one rank's cache of keys and values to caches of other ranks.

Entry i of a rank's list says that its page ``source_pages[i]`` becomes page ``dest_pages[i]`` of
rank ``dest_ranks[i]``, which may be the rank itself; entries whose rank is -1 stand for nothing. On
one rank no page may be written twice, or both read and written. All other pages keep their bits.

The call is one-sided: a rank writes into the caches of the others, and waits for nobody. A page has
arrived when the sender's launch has ended and the receiver has heard of that from the host. A
receiver that sends nothing launches nothing, so its GPU may compute all the while, and a layer's
pages can travel while later layers compute.

Sources: Patel et al., "Splitwise" (2024) and Zhong et al., "DistServe" (2024), which move caches
from a GPU that reads prompts to one that writes; Qin et al., "Mooncake" (2024), layer by layer.
"""

from __future__ import annotations

from kernelcat import dtypes
from kernelcat.catalog.spec import EXACT, Axis, Entry, Problem, Tensor, exact
from kernelcat.reference._arrays import library_of
from kernelcat.reference.all_reduce import MAX_RANKS

DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "uint8")
CACHES = ("k_cache", "v_cache")


def page_bytes(problem: Problem) -> int:
    """Bytes of a page of one cache."""
    return int(problem["page_size"] * problem["row"] * dtypes.itemsize(problem["dtype"]))


def _oracle(problem, arrays):
    lists = (arrays[name] for name in ("source_pages", "dest_ranks", "dest_pages"))
    sources, ranks, pages = (each.tolist() for each in lists)
    outputs = {}
    for name in CACHES[: problem["caches"]]:
        cache, out = arrays[name], arrays[name].copy()
        for source in range(problem["ranks"]):
            for i, rank in enumerate(ranks[source]):
                if rank >= 0:
                    out[rank, pages[source][i]] = cache[source, sources[source][i]]
        outputs[name] = out
    return outputs


def _make_inputs(problem, normal):
    """Half of each rank's pages, shuffled, may be read, and the others may be written once."""
    num_ranks, num_pages, count = (problem[axis] for axis in ("ranks", "pages", "count"))
    shape = (num_ranks, num_pages, problem["page_size"], problem["row"])
    caches = {name: normal(shape) * 50 for name in CACHES[: problem["caches"]]}
    xp = library_of(normal((1,)))
    orders = normal((num_ranks, num_pages)).argsort(axis=1).tolist()
    readable = [order[: -(-num_pages // 2)] for order in orders]
    writable = [order[len(some) :] for order, some in zip(orders, readable, strict=True)]
    draws = (abs(normal((num_ranks, count))) * 1e4).astype("int64").tolist()
    sources, ranks, pages = ([[-1] * count for _ in range(num_ranks)] for _ in range(3))
    for i in range(count):
        for source in range(num_ranks):
            rank = _receiver(problem, source, draws[source][i])
            if rank >= 0 and readable[source] and writable[rank]:
                sources[source][i] = readable[source][draws[source][i] % len(readable[source])]
                ranks[source][i], pages[source][i] = rank, writable[rank].pop()
    lists = {"source_pages": sources, "dest_ranks": ranks, "dest_pages": pages}
    shape = (num_ranks, count)
    return caches | {n: xp.asarray(v, dtype="int32").reshape(shape) for n, v in lists.items()}


def _receiver(problem, source: int, draw: int) -> int:
    """The rank that gets an entry of ``source``; -1 for none."""
    if problem["senders"] == "first":
        return 1 + draw % (problem["ranks"] - 1) if source == 0 else -1
    return draw % (problem["ranks"] + 1) - 1


def _bytes_moved(problem: Problem) -> int:
    """Bytes that a rank moves which sends its whole list: it reads pages, and writes to others."""
    return 2 * problem["caches"] * problem["count"] * page_bytes(problem) + 12 * problem["count"]


def _constraint(problem: Problem) -> str | None:
    if problem["page_size"] < 1 or problem["row"] < 1:
        return f"page_size={problem['page_size']} and row={problem['row']} must be at least 1"
    return None


def transferred(count: int, row: int, caches: int, **axes) -> Problem:
    """The problem of rank 0 of two sending ``count`` pages; ``axes`` are others."""
    others = {
        "pages": 2 * count, "page_size": 64, "ranks": 2, "dtype": "bfloat16", "senders": "first",
        **axes,
    }  # fmt: skip
    return Problem.of("kv_transfer", count=count, row=row, caches=caches, **others)


def _problems() -> dict[str, Problem]:
    """A layer of gpt-oss, of its float8 cache, of DeepSeek-V3 in 16 bits and packed; odd sizes."""
    kinds = {
        "gptoss": (512, 2, "bfloat16"),
        "gptoss-fp8": (512, 2, "float8_e4m3fn"),
        "dsv3": (576, 1, "bfloat16"),
        "dsv3-packed": (656, 1, "uint8"),
    }
    named = {f"{name}-{64 * count}": transferred(count, row, caches, dtype=dtype)
             for name, (row, caches, dtype) in kinds.items() for count in COUNTS}  # fmt: skip
    odd = {"page_size": 3, "dtype": "float8_e4m3fn", "senders": "all"}
    return named | {"odd-37x131": transferred(37, 131, 2, **odd)}


COUNTS = (1, 8, 32, 128)
"""Pages of 64 tokens of a prompt, or of its part in a step."""

_LIST = ("ranks", "count")
_CACHE = ("ranks", "pages", "page_size", "row")

ENTRY = Entry(
    name="kv_transfer",
    summary="Pages of one rank's cache of keys and values to caches of other ranks, one-sided.",
    axes=(
        Axis.size("count", "entries of each rank's list", 0, 40, varies=True),
        Axis.size("pages", "pages of each rank's cache", 1, 60, varies=True),
        Axis.size("page_size", "tokens of a page", 1, 64, exact),
        Axis.size("row", "elements of a token in one cache", 1, 700, exact),
        Axis.choice("caches", "1: latent rows; 2: keys and values", 1, 2),
        Axis.choice("ranks", "processes", *range(2, MAX_RANKS + 1), default=2),
        Axis.choice("dtype", "element type of the caches", *DTYPES),
        Axis.choice(
            "senders", "whether rank 0 alone has entries, or all ranks do", "first", "all",
            default="first", drawn=True,
        ),
    ),
    inputs=(
        Tensor("source_pages", _LIST, "int32", "pages that are read"),
        Tensor("dest_ranks", _LIST, "int32", "the rank that gets each page; -1 for none"),
        Tensor("dest_pages", _LIST, "int32", "the page that it becomes there"),
    ),
    outputs=(
        Tensor("k_cache", _CACHE, "dtype", "keys, or latent rows", updated=True, mapped=True),
        Tensor(
            "v_cache", _CACHE, "dtype", "values", flag="caches", when=2, updated=True, mapped=True
        ),
    ),
    oracle=_oracle,
    make_inputs=_make_inputs,
    tolerance=dict.fromkeys(DTYPES, EXACT),
    flops=lambda problem: 0,
    bytes_moved=_bytes_moved,
    problems=_problems(),
    constraint=_constraint,
    ranks="ranks",
    one_sided=True,
)  # fmt: skip
