"""DeepSeek's latent attention in torch: prompts, then one CUDA graph for every decode step.

    python examples/mla_decode.py

A paged cache keeps a latent and a rotated key of each token. Prompts are attended with keys and
values of every head, which are made of the latents; decoding is with weights absorbed, so that all
heads share the cache. Each result is compared with torch's own attention.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

import kernelcat
from kernelcat.layers import mla

PROMPTS = (700, 33, 1, 256)
"""Tokens of each sequence's prompt."""
ROOM, PAGE_SIZE, STEPS = 1024, 64, 20
HEADS, NOPE, ROPE, V, LATENT = 16, 128, 64, 128, 512  # DeepSeek-V3's, for an eighth of the heads
SCALE = mla.sm_scale(NOPE + ROPE, yarn=40)


def main():
    write, attend = kernelcat.get("mla_kv_write"), kernelcat.get("flashmla")
    batch, width = len(PROMPTS), ROOM // PAGE_SIZE
    kv_cache = torch.empty(batch * width, PAGE_SIZE, LATENT + ROPE, dtype=torch.bfloat16)
    block_table = torch.randperm(batch * width).view(batch, width).int()  # pages in any order
    kv_lens, cos_sin = torch.tensor(PROMPTS).int(), rotations()
    kv_b = random(HEADS * (NOPE + V), LATENT) * LATENT**-0.5
    w_uk, w_uv = mla.split(kv_b, HEADS, NOPE)

    # Prefill: the prompts of all sequences, one after the other.
    q_nope, q_pe, c, k_pe = new_tokens(sum(PROMPTS))
    cu_q = torch.tensor([sum(PROMPTS[:s]) for s in range(batch + 1)]).int()
    write(c, k_pe, block_table, kv_lens, cu_q, cos_sin, out=kv_cache)
    q_pe = mla.rotate(q_pe, cos_sin, torch.cat([torch.arange(length) for length in PROMPTS]))
    out, _ = mla.prefill(q_nope, q_pe, kv_b, kv_cache, block_table, PROMPTS, PROMPTS, SCALE)
    report("prefill", out, q_nope, q_pe, kv_b, kv_cache, block_table, kv_lens, cu_q)

    # Decode: one token of each sequence a step.
    new = q_nope, q_pe, c, k_pe = new_tokens(batch)
    cu_q, turned = torch.arange(batch + 1).int(), torch.empty_like(q_pe)
    q, out = random(batch, HEADS, LATENT + ROPE), random(batch, HEADS, V)
    append = write.bind(c, k_pe, block_table, kv_lens, cu_q, cos_sin, out=kv_cache)
    run = attend.bind(q, kv_cache, block_table, kv_lens, cu_q, sm_scale=SCALE)

    def step():
        kv_lens.add_(1)
        append()
        turned.copy_(mla.rotate(q_pe, cos_sin, kv_lens - 1))
        q.copy_(mla.absorb(q_nope, turned, w_uk))
        run()
        out.copy_(mla.expand(run.out[0], w_uv))

    replay = capture(step)
    for number in range(STEPS):
        for array in new:
            array.normal_()
        replay()
        report(f"step {number}", out, q_nope, turned, kv_b, kv_cache, block_table, kv_lens, cu_q)


def rotations(base=10000.0):
    """Cosines, then sines, of each position (RoPE)."""
    frequencies = base ** -(torch.arange(0, ROPE, 2) / ROPE)
    angles = torch.arange(ROOM)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), 1)


def new_tokens(count):
    """What a layer's projections give: of queries, both parts, and latents and keys to rotate."""
    shapes = (HEADS, NOPE), (HEADS, ROPE), (LATENT,), (ROPE,)
    return [random(count, *shape) for shape in shapes]


def random(*shape):
    return torch.randn(shape, dtype=torch.bfloat16)


def capture(step):
    """A CUDA graph of what ``step`` launches, as a function."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def report(name, out, q_nope, q_pe, kv_b, kv_cache, block_table, kv_lens, cu_q):
    """Print how far ``out`` is from torch's attention in float32, sequence by sequence."""
    largest = 0.0
    for s, kv_len in enumerate(kv_lens.tolist()):
        asked = slice(cu_q[s], cu_q[s + 1])
        c, k_pe = kv_cache[block_table[s]].flatten(0, 1)[:kv_len].float().split((LATENT, ROPE), 1)
        k, v = (c @ kv_b.float().T).view(kv_len, HEADS, -1).split((NOPE, V), 2)
        k = torch.cat((k, k_pe[:, None].expand(-1, HEADS, -1)), 2)
        q = torch.cat((q_nope[asked], q_pe[asked]), 2).float()
        dense = scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), scale=SCALE,
            is_causal=len(q) > 1,  # a single query sees every token
        )  # fmt: skip
        largest = max(largest, (dense[0].transpose(0, 1) - out[asked]).abs().max().item())
    print(f"{name}: largest difference from torch {largest:.4f}")


if __name__ == "__main__":
    torch.set_default_device("cuda")
    main()
