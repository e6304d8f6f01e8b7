"""Attention of a small server in torch: prompts, then one CUDA graph for every decoding step.

    python examples/paged_attention.py

Sequences of different lengths share a paged cache of keys and values. One kernel rotates queries
and keys and appends keys and values to the cache, another computes attention. Both read lengths and
block table on the GPU, so that a graph that is captured once serves every step. Every result is
compared with torch's attention.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

import kernelcat

PROMPTS = (700, 33, 1, 256)
"""Tokens of each sequence's prompt."""
MAX_TOKENS, PAGE_SIZE, STEPS = 1024, 16, 20
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def main():
    write, attend = kernelcat.get("kv_write"), kernelcat.get("paged_attn")
    batch, width = len(PROMPTS), MAX_TOKENS // PAGE_SIZE
    caches = torch.empty(2, batch * width, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    block_table = torch.randperm(batch * width).view(batch, width).int()  # pages in any order
    kv_lens, cos_sin = torch.tensor(PROMPTS).int(), rotations()

    # Prefill: the prompts of all sequences, one after another.
    q, k, v = (random(sum(PROMPTS), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    cu_q = torch.tensor([sum(PROMPTS[:s]) for s in range(batch + 1)]).int()
    q_rotated = torch.empty_like(q)
    write(q, k, v, block_table, kv_lens, cu_q, cos_sin, out=(q_rotated, *caches))
    out, _ = attend(q_rotated, *caches, block_table, kv_lens, cu_q, max_q=max(PROMPTS))
    report("prefill", out, q_rotated, caches, block_table, kv_lens, cu_q)

    # Decoding: one token of each sequence a step. The arrays are the captured graph's.
    q, k, v = (random(batch, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    cu_q, q_rotated = torch.arange(batch + 1).int(), torch.empty_like(q)
    append = write.bind(q, k, v, block_table, kv_lens, cu_q, cos_sin, out=(q_rotated, *caches))
    run = attend.bind(q_rotated, *caches, block_table, kv_lens, cu_q)

    def step():
        kv_lens.add_(1)
        append()
        run()

    replay = capture(step)
    for number in range(STEPS):
        for array in (q, k, v):
            array.normal_()
        replay()
        report(f"step {number}", run.out[0], q_rotated, caches, block_table, kv_lens, cu_q)


def rotations(base=10000.0):
    """RoPE's cosines, then sines, of each position: (MAX_TOKENS, HEAD_DIM)."""
    frequencies = base ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(MAX_TOKENS)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), 1)


def random(*shape):
    return torch.randn(shape, dtype=torch.bfloat16)


def capture(step):
    """A function that replays the kernels of ``step``, captured in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def report(name, out, q, caches, block_table, kv_lens, cu_q):
    """Print the largest difference between ``out`` and torch's attention.

    ``out`` and rotated ``q`` are (tokens, HEADS, HEAD_DIM). Other arrays are as in :func:`main`.
    """
    largest = 0.0
    for s, kv_len in enumerate(kv_lens.tolist()):
        rows = slice(cu_q[s], cu_q[s + 1])
        k, v = caches[:, block_table[s]].flatten(1, 2)[:, :kv_len].transpose(1, 2)
        dense = scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None], k[None], v[None],
            is_causal=len(q[rows]) > 1,  # a single query attends to every token
            enable_gqa=True,
        )  # fmt: skip
        largest = max(largest, (dense[0].transpose(0, 1) - out[rows]).abs().max().item())
    print(f"{name}: largest difference from torch {largest:.4f}")


if __name__ == "__main__":
    torch.set_default_device("cuda")
    main()
