"""A model of transformers on the catalog's attention and products, beside the model's own.

    python examples/transformers_model.py

The model is generated: nothing is downloaded. Its attention calls ``paged_attn`` through
transformers' attention interface, over a cache of pages that is a cache of transformers, and its
linear layers call ``gemm``. Both models write greedily from the same prompts; then the catalog's
reads what the other one wrote and says which token it would write next. Operators are forward only:
a model that is trained needs its own layers.
"""

import time

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, LogitsProcessor
from transformers.cache_utils import Cache, CacheLayerMixin

import kernelcat

NAME = "kernelcat"
"""Name of the attention in transformers' interface."""
CONFIG = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "vocab_size": 32000,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
DTYPE = torch.bfloat16
BATCH, PROMPT, NEW_TOKENS, PAGE_SIZE = 4, 128, 64, 16


class Pages:
    """Page tables and lengths of ``batch`` sequences of equal length, for all layers of a model."""

    def __init__(self, batch, max_tokens):
        width = -(-max_tokens // PAGE_SIZE)
        self.block_table = torch.arange(batch * width, dtype=torch.int32).view(batch, width)
        self.length = 0
        self.attend = kernelcat.get("paged_attn")

    def attention(self, module, query, key, value, attention_mask, scaling, **_):
        """What transformers calls; the result is (batch, new, heads, head_dim).

        ``query`` is (batch, heads, new, head_dim); ``key`` and ``value`` are what the cache
        returned, here all pages.
        """
        assert attention_mask is None, "sequences of different lengths need lengths of their own"
        batch, heads, new, dim = query.shape
        q = query.transpose(1, 2).reshape(batch * new, heads, dim).contiguous()
        kv_lens = torch.full((batch,), self.length, dtype=torch.int32)
        cu_q = torch.arange(batch + 1, dtype=torch.int32) * new
        out, _ = self.attend(
            q, key, value, self.block_table, kv_lens, cu_q, max_q=new, sm_scale=scaling
        )
        return out.view(batch, new, heads, dim), None


class PagedLayer(CacheLayerMixin):
    """The pages of one layer: (pages, PAGE_SIZE, kv_heads, head_dim), keys and values."""

    is_sliding = False

    def __init__(self, pages):
        super().__init__()
        self.pages, self.length = pages, 0

    def lazy_initialization(self, key_states, value_states):
        _, kv_heads, _, dim = key_states.shape
        shape = (self.pages.block_table.numel(), PAGE_SIZE, kv_heads, dim)
        self.keys, self.values = key_states.new_zeros(shape), value_states.new_zeros(shape)
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Put the new tokens (batch, kv_heads, new, head_dim) behind the others."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        for cache, new in ((self.keys, key_states), (self.values, value_states)):
            sequences = cache.view(len(new), -1, *cache.shape[2:])  # pages lie in order
            sequences[:, self.length : end] = new.transpose(1, 2)
        self.length = self.pages.length = end
        return self.keys, self.values

    def get_seq_length(self):
        return self.length

    def get_mask_sizes(self, query_length):
        return self.length + query_length, 0

    def get_max_length(self):
        return self.pages.block_table.shape[1] * PAGE_SIZE


class Linear(torch.nn.Module):
    """The product of a ``torch.nn.Linear``, whose weights it shares, by ``gemm``."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.multiply = kernelcat.get("gemm")

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y = self.multiply(rows, self.weight.detach(), bias=self.bias)
        return y.view(*x.shape[:-1], -1)


def replace_products(module):
    """Put :class:`Linear` in the place of every ``torch.nn.Linear`` below ``module``."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear):
            setattr(module, name, Linear(child))
        else:
            replace_products(child)


class Reader(LogitsProcessor):
    """Makes a model go on with ``text`` (BATCH, NEW_TOKENS), and keeps what it would have written.

    Rounding may decide between two tokens that are about as likely; a model that wrote the other
    one would read another text from there on.
    """

    def __init__(self, text):
        self.text, self.chosen = text, []

    def __call__(self, input_ids, scores):
        next_token = self.text[:, len(self.chosen), None]
        self.chosen.append(scores.argmax(-1))
        return torch.full_like(scores, -torch.inf).scatter(1, next_token, 0.0)


def own(model, prompts):
    """Greedy tokens (BATCH, NEW_TOKENS) by the model's own layers."""
    return generate(model, prompts)


def ours(model, prompts, **options):
    """Greedy tokens (BATCH, NEW_TOKENS) by the catalog's kernels."""
    pages = Pages(len(prompts), PROMPT + NEW_TOKENS)
    AttentionInterface.register(NAME, pages.attention)
    layers = [PagedLayer(pages) for _ in range(model.config.num_hidden_layers)]
    return generate(model, prompts, past_key_values=Cache(layers=layers), **options)


def generate(model, prompts, **options):
    options |= {"attention_mask": torch.ones_like(prompts), "pad_token_id": 0}
    done = model.generate(
        prompts, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, **options
    )
    return done[:, prompts.shape[1] :]


def timed(write, model, prompts):
    """Tokens and tokens a second of a second run: the first one compiles."""
    write(model, prompts)
    synchronize()
    start = time.perf_counter()
    tokens = write(model, prompts)
    synchronize()
    return tokens, tokens.numel() / (time.perf_counter() - start)


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.inference_mode()
def main():
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG, attn_implementation="sdpa", initializer_range=0.1)
    model = LlamaForCausalLM(config).to(DTYPE).eval()
    prompts = torch.randint(0, config.vocab_size, (BATCH, PROMPT))
    expected, their_rate = timed(own, model, prompts)
    replace_products(model)
    AttentionInterface.register(NAME, Pages.attention)
    model.set_attn_implementation(NAME)
    _, our_rate = timed(ours, model, prompts)
    reader = Reader(expected)
    ours(model, prompts, logits_processor=[reader])
    equal = int((torch.stack(reader.chosen, 1) == expected).sum())
    print(f"the same next token after the same text: {equal} of {expected.numel()}")
    print(f"transformers: {their_rate:,.0f} tokens/s, with the catalog: {our_rate:,.0f} tokens/s")


if __name__ == "__main__":
    torch.set_default_device("cuda")
    main()
