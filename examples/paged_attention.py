"""Attention of a small server, in torch: prefill, then one CUDA graph for every decode step.

    python examples/paged_attention.py

Sequences of different lengths share a paged cache of keys and values. The kernels read lengths and
block table when they run, so that a graph captured once serves every step. Each result is compared
with torch's own attention.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

import kernelcat

PROMPTS = (700, 33, 1, 256)
"""Tokens of each sequence's prompt."""
ROOM, PAGE_SIZE, STEPS = 1024, 16, 20
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def main():
    attend, batch, width = kernelcat.get("paged_attn"), len(PROMPTS), ROOM // PAGE_SIZE
    caches = torch.empty(2, batch * width, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    block_table = torch.randperm(batch * width).view(batch, width).int()  # pages in any order
    seqs, kv_lens = torch.arange(batch), torch.tensor(PROMPTS).int()

    # Prefill: the prompts of all sequences, one after the other.
    q, new = random(sum(PROMPTS), HEADS, HEAD_DIM), random(2, sum(PROMPTS), KV_HEADS, HEAD_DIM)
    cu_q = torch.tensor([sum(PROMPTS[:s]) for s in range(batch + 1)]).int()
    owners = seqs.repeat_interleave(kv_lens)
    write(caches, new, block_table, owners, torch.arange(len(q)) - cu_q[owners])
    out, _ = attend(q, *caches, block_table, kv_lens, cu_q, max_q=max(PROMPTS))
    report("prefill", out, q, caches, block_table, kv_lens, cu_q)

    # Decode: one token of each sequence a step.
    q, new = random(batch, HEADS, HEAD_DIM), random(2, batch, KV_HEADS, HEAD_DIM)
    cu_q = torch.arange(batch + 1).int()
    run = attend.bind(q, *caches, block_table, kv_lens, cu_q)

    def step():
        write(caches, new, block_table, seqs, kv_lens)
        kv_lens.add_(1)
        run()

    replay = capture(step)
    for number in range(STEPS):
        q.normal_()
        new.normal_()
        replay()
        report(f"step {number}", run.out[0], q, caches, block_table, kv_lens, cu_q)


def random(*shape):
    return torch.randn(shape, dtype=torch.bfloat16)


def write(
    caches,  # (2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    new,  # (2, tokens, KV_HEADS, HEAD_DIM)
    block_table,  # (batch, pages of a sequence)
    seqs,  # (tokens,)
    positions,  # (tokens,)
):
    """Put keys and values of new tokens where their sequences have room for them."""
    caches[:, block_table[seqs, positions // PAGE_SIZE], positions % PAGE_SIZE] = new


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
