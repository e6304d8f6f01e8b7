"""Models whose every heavy operation is an entry of the catalog.

    >>> from kernelcat import moe
    >>> model = moe.load("gpt-oss-20b")                      # a folder, as published
    >>> cache = moe.KvCache.allocate(model.cache_layers, [512, 512], 64, model.dtype, "cuda")
    >>> pages = [[0, 1], [7, 3]]                             # of one sequence, for each group
    >>> batch = moe.Batch.of([moe.Chunk(prompt, 0, pages)], "cuda")
    >>> values, ids = model.best(model(batch, cache))        # the first token after the prompt

An engine and a model share three nouns, and nothing else:

    Batch      the new tokens of some sequences (chunks of prompts and decoded tokens mixed) with
               block tables, lengths and starts: the tensors that the entries take
    KvCache    tensors of each layer. Layers with the same attention window are a group and share a
               block table; `model.cache_layers` says what each layer stores
    Decoder    ``model(batch, cache)`` writes the new tokens to the cache and returns the hidden
               states of ``batch.rows``; ``model.logits`` and ``model.best`` apply the head

A model keeps no state of sequences. Page numbers and lengths are the engine's: any page of a group
may hold any tokens, and sequences may share pages of a common prefix. Nothing is read on the host,
so that a call can be captured in a CUDA graph and replayed with other contents of the batch's
tensors. `ops.on("cpu")` binds the catalog's oracles instead of kernels: the same code then runs on
a CPU, slowly.

``gpt_oss``, ``qwen3_moe``, ``deepseek_v3``, ``mixtral`` and ``llama`` are a model each; ``blocks``
has what several share, ``sizes`` their configurations by name, ``loading`` makes them from
checkpoints or random weights, ``upcycle`` makes a mixture of experts of a Llama, ``download`` and
``gguf_file`` bring SmolLM2. ``engine`` runs them for many requests at once, ``serve`` by HTTP.
``bench`` measures an engine, ``profile`` where its steps' time goes, and ``ladder`` what each part
brings, from a model in plain torch (``eager``) on.
"""

from kernelcat.errors import MissingDependency

try:
    import torch as torch
except ModuleNotFoundError as error:
    raise MissingDependency("models need torch: pip install 'kernelcat[moe]'") from error

from kernelcat.moe.batch import Batch, Chunk
from kernelcat.moe.cache import CacheLayer, KvCache, page_bytes, windows
from kernelcat.moe.config import Config
from kernelcat.moe.loading import build, config_of, load, random_model, write_checkpoint
from kernelcat.moe.model import Decoder
from kernelcat.moe.ops import Ops, on
from kernelcat.moe.sizes import SIZES
from kernelcat.moe.weights import CheckpointWeights, RandomWeights, Weights

__all__ = [
    "SIZES",
    "Batch",
    "CacheLayer",
    "CheckpointWeights",
    "Chunk",
    "Config",
    "Decoder",
    "KvCache",
    "Ops",
    "RandomWeights",
    "Weights",
    "build",
    "config_of",
    "load",
    "on",
    "page_bytes",
    "random_model",
    "windows",
    "write_checkpoint",
]
