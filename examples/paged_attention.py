"""Attention of a small server, in torch: prefill, then one CUDA graph for every decode step.

    python examples/paged_attention.py

Sequences of different lengths share a paged cache of keys and values. One kernel turns queries and
keys by their positions and appends to the cache, another attends. Both read lengths and block table
when they run, so that a graph captured once serves every step. Each result is compared with torch's
own attention.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

import kernelcat

PROMPTS = (700, 33, 1, 256)
"""Tokens of each sequence's prompt."""
ROOM, PAGE_SIZE, STEPS = 1024, 16, 20
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def main():
    append, attend = kernelcat.get("kv_write"), kernelcat.get("paged_attn")
    batch, width = len(PROMPTS), ROOM // PAGE_SIZE
    caches = torch.empty(2, batch * width, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    block_table = torch.randperm(batch * width).view(batch, width).int()  # pages in any order
    kv_lens, cos_sin = torch.tensor(PROMPTS).int(), rotations()

    # Prefill: the prompts of all sequences, one after the other.
    q, k, v = (random(sum(PROMPTS), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    cu_q = torch.tensor([sum(PROMPTS[:s]) for s in range(batch + 1)]).int()
    turned = torch.empty_like(q)
    append(q, k, v, block_table, kv_lens, cu_q, cos_sin, out=(turned, *caches))
    out, _ = attend(turned, *caches, block_table, kv_lens, cu_q, max_q=max(PROMPTS))
    report("prefill", out, turned, caches, block_table, kv_lens, cu_q)

    # Decode: one token of each sequence a step.
    q, k, v = (random(batch, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    cu_q, turned = torch.arange(batch + 1).int(), torch.empty_like(q)
    write = append.bind(q, k, v, block_table, kv_lens, cu_q, cos_sin, out=(turned, *caches))
    run = attend.bind(turned, *caches, block_table, kv_lens, cu_q)

    def step():
        kv_lens.add_(1)
        write()
        run()

    replay = capture(step)
    for number in range(STEPS):
        for new in (q, k, v):
            new.normal_()
        replay()
        report(f"step {number}", run.out[0], turned, caches, block_table, kv_lens, cu_q)


def rotations(base=10000.0):
    """Cosines, then sines, of each position (RoPE)."""
    frequencies = base ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(ROOM)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), 1)


def random(*shape):
    return torch.randn(shape, dtype=torch.bfloat16)


def capture(step):
    """A CUDA graph of what ``step`` launches, as a function."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def report(name, out, q, caches, block_table, kv_lens, cu_q):
    """Print how far ``out`` is from torch's attention, sequence by sequence."""
    largest = 0.0
    for s, kv_len in enumerate(kv_lens.tolist()):
        asked = slice(cu_q[s], cu_q[s + 1])
        k, v = caches[:, block_table[s]].flatten(1, 2)[:, :kv_len].transpose(1, 2)
        dense = scaled_dot_product_attention(
            q[asked].transpose(0, 1)[None], k[None], v[None],
            is_causal=len(q[asked]) > 1,  # a single query sees every token
            enable_gqa=True,
        )  # fmt: skip
        largest = max(largest, (dense[0].transpose(0, 1) - out[asked]).abs().max().item())
    print(f"{name}: largest difference from torch {largest:.4f}")


if __name__ == "__main__":
    torch.set_default_device("cuda")
    main()
