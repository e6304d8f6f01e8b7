"""DeepSeek's latent attention in torch: prompts, then one CUDA graph for every decoding step.

    python examples/mla_decode.py

A paged cache keeps, for each token, a latent and the rotated part of the key. Prompts are attended
to with keys and values of every head, which are made of the latents. Decoding has the weights
absorbed into queries and results, so that all heads share the cache. Every result is compared with
torch's attention.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

import kernelcat
from kernelcat.layers import mla

PROMPTS = (700, 33, 1, 256)
"""Tokens of each sequence's prompt."""
MAX_TOKENS, PAGE_SIZE, STEPS = 1024, 64, 20
HEADS, NOPE, ROPE, V, LATENT = 16, 128, 64, 128, 512  # DeepSeek-V3 with an eighth of its heads
SCALE = mla.sm_scale(NOPE + ROPE, yarn=40)


def main():
    write, attend = kernelcat.get("mla_kv_write"), kernelcat.get("flashmla")
    batch, width = len(PROMPTS), MAX_TOKENS // PAGE_SIZE
    kv_cache = torch.empty(batch * width, PAGE_SIZE, LATENT + ROPE, dtype=torch.bfloat16)
    block_table = torch.randperm(batch * width).view(batch, width).int()  # pages in any order
    kv_lens, cos_sin = torch.tensor(PROMPTS).int(), rotations()
    kv_b = random(HEADS * (NOPE + V), LATENT) * LATENT**-0.5
    w_uk, w_uv = mla.split(kv_b, HEADS, NOPE)

    # Prefill: the prompts of all sequences, one after another.
    q_nope, q_pe, c, k_pe = new_tokens(sum(PROMPTS))
    cu_q = torch.tensor([sum(PROMPTS[:s]) for s in range(batch + 1)]).int()
    write(c, k_pe, block_table, kv_lens, cu_q, cos_sin, out=kv_cache)
    q_pe = mla.rotate(q_pe, cos_sin, torch.cat([torch.arange(length) for length in PROMPTS]))
    out, _ = mla.prefill(q_nope, q_pe, kv_b, kv_cache, block_table, PROMPTS, PROMPTS, SCALE)
    report("prefill", out, q_nope, q_pe, kv_b, kv_cache, block_table, kv_lens, cu_q)

    # Decoding: one token of each sequence a step. The arrays are the captured graph's.
    projections = q_nope, q_pe, c, k_pe = new_tokens(batch)
    cu_q, q_rotated = torch.arange(batch + 1).int(), torch.empty_like(q_pe)
    q, out = random(batch, HEADS, LATENT + ROPE), random(batch, HEADS, V)
    append = write.bind(c, k_pe, block_table, kv_lens, cu_q, cos_sin, out=kv_cache)
    run = attend.bind(q, kv_cache, block_table, kv_lens, cu_q, sm_scale=SCALE)

    def step():
        kv_lens.add_(1)
        append()
        q_rotated.copy_(mla.rotate(q_pe, cos_sin, kv_lens - 1))
        q.copy_(mla.absorb(q_nope, q_rotated, w_uk))
        run()
        out.copy_(mla.expand(run.out[0], w_uv))

    replay = capture(step)
    for number in range(STEPS):
        for array in projections:
            array.normal_()
        replay()
        report(f"step {number}", out, q_nope, q_rotated, kv_b, kv_cache, block_table, kv_lens, cu_q)


def rotations(base=10000.0):
    """RoPE's cosines, then sines, of each position: (MAX_TOKENS, ROPE)."""
    frequencies = base ** -(torch.arange(0, ROPE, 2) / ROPE)
    angles = torch.arange(MAX_TOKENS)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), 1)


def new_tokens(count):
    """Random results of a layer's projections: q_nope, q_pe, c and k_pe of ``count`` tokens."""
    shapes = (HEADS, NOPE), (HEADS, ROPE), (LATENT,), (ROPE,)
    return [random(count, *shape) for shape in shapes]


def random(*shape):
    return torch.randn(shape, dtype=torch.bfloat16)


def capture(step):
    """A function that replays the kernels of ``step``, captured in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def report(name, out, q_nope, q_pe, kv_b, kv_cache, block_table, kv_lens, cu_q):
    """Print the largest difference between ``out`` and torch's attention in float32.

    ``out`` is (tokens, HEADS, V), and its queries are q_nope (tokens, HEADS, NOPE) and rotated q_pe
    (tokens, HEADS, ROPE). Other arrays are as in :func:`main`.
    """
    largest = 0.0
    for s, kv_len in enumerate(kv_lens.tolist()):
        rows = slice(cu_q[s], cu_q[s + 1])
        c, k_pe = kv_cache[block_table[s]].flatten(0, 1)[:kv_len].float().split((LATENT, ROPE), 1)
        k, v = (c @ kv_b.float().T).view(kv_len, HEADS, -1).split((NOPE, V), 2)
        k = torch.cat((k, k_pe[:, None].expand(-1, HEADS, -1)), 2)
        q = torch.cat((q_nope[rows], q_pe[rows]), 2).float()
        dense = scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), scale=SCALE,
            is_causal=len(q) > 1,  # a single query attends to every token
        )  # fmt: skip
        largest = max(largest, (dense[0].transpose(0, 1) - out[rows]).abs().max().item())
    print(f"{name}: largest difference from torch {largest:.4f}")


if __name__ == "__main__":
    torch.set_default_device("cuda")
    main()
