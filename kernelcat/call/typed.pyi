# ruff: noqa
# fmt: off
# Made by `make readme` from the specifications in reference/: change those files, not this one.
"""What editors and type checkers know of ``kernelcat.get``: the call of each entry, by name."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, overload

from kernelcat.call.fast_path import Bound
from kernelcat.call.operator import Op

class Array(Protocol):
    """An array of torch, CuPy or any library that speaks DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

class AllReduce(Op):
    def __call__(  # type: ignore[override]
        self,
        x: Array,
        residual: Array | None = ...,
        weight: Array | None = ...,
        *,
        eps: float = ...,
        out: tuple[Array | None, ...] | None = ...,
    ) -> tuple[Any, Any]:
        r"""all_reduce(x, residual=None, weight=None, eps=1e-05, out=None) -> out, normed

        Sum of an array over all ranks, on every rank; residual and RMSNorm are fused.

        Parameters
        ----------
        x : (ranks, tokens, hidden) dtype
            what each rank adds
        residual : (ranks, tokens, hidden) dtype, optional
            added first, on its rank
        weight : (ranks, hidden) dtype, optional
            of the norm
        eps : float, 1e-05 by default
            added to the mean square, at least 1e-12
        out : tuple of arrays (out, normed), optional
            where results go; allocated if left out

        Returns
        -------
        out : (ranks, tokens, hidden) dtype
            the sum, on each rank
        normed : (ranks, tokens, hidden) dtype, optional
            the sums, normalized

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are ranks: 2, 3, 4, 5, 6, 7, 8; dtype: bfloat16, float16; residual: False, True; norm:
            False, True.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/all_reduce.py and kernelcat.reference('all_reduce').
        """
    def bind(  # type: ignore[override]
        self,
        x: Array,
        residual: Array | None = ...,
        weight: Array | None = ...,
        *,
        eps: float = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class AttnMerge(Op):
    def __call__(  # type: ignore[override]
        self,
        outs: Array,
        lses: Array,
        *,
        out: tuple[Array | None, ...] | None = ...,
    ) -> tuple[Any, Any]:
        r"""attn_merge(outs, lses, out=None) -> out, lse

        Attention over all keys from attention over parts of them, by their log-sum-exps.

        Parameters
        ----------
        outs : (parts, tokens, heads, head_dim) dtype
            attention over the keys of each part
        lses : (parts, tokens, heads) float32
            natural log of each part's softmax denominator; -inf: the part has no visible key
        out : tuple of arrays (out, lse), optional
            where results go; allocated if left out

        Returns
        -------
        out : (tokens, heads, head_dim) dtype
            attention over all keys
        lse : (tokens, heads) float32
            natural log of the softmax denominator over all keys

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are head_dim: 64, 128, 256; dtype: bfloat16, float16.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/attn_merge.py and kernelcat.reference('attn_merge').
        """
    def bind(  # type: ignore[override]
        self,
        outs: Array,
        lses: Array,
        *,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class Embedding(Op):
    def __call__(  # type: ignore[override]
        self,
        ids: Array,
        table: Array,
        *,
        scale: float = ...,
        out: Array | None = ...,
    ) -> Any:
        r"""embedding(ids, table, scale=1.0, out=None) -> out

        Rows of a table by token ids, times a scale; ids outside of the table give zeros.

        Parameters
        ----------
        ids : (tokens,) id_dtype
            row of each token; outside of the table: zeros
        table : (vocab, hidden) dtype
            embeddings of all tokens
        scale : float, 1.0 by default
            factor of all rows
        out : array, optional
            where results go; allocated if left out

        Returns
        -------
        out : (tokens, hidden) dtype
            embeddings of the tokens

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: bfloat16, float16; id_dtype: int32, int64.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/embedding.py and kernelcat.reference('embedding').
        """
    def bind(  # type: ignore[override]
        self,
        ids: Array,
        table: Array,
        *,
        scale: float = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class Flashmla(Op):
    def __call__(  # type: ignore[override]
        self,
        q: Array,
        kv_cache: Array,
        block_table: Array,
        kv_lens: Array,
        cu_q: Array,
        *,
        max_q: int = ...,
        sm_scale: float,
        out: tuple[Array | None, ...] | None = ...,
    ) -> tuple[Any, Any]:
        r"""flashmla(q, kv_cache, block_table, kv_lens, cu_q, max_q=1, sm_scale, out=None) -> out, lse

        Multi-head latent attention with absorbed weights over a paged cache (DeepSeek).

        Parameters
        ----------
        q : (tokens, heads, 576) dtype
            queries, one sequence after another: [q_nope @ W_UK (512) | rope(q_pe) (64)]
        kv_cache : (pages, page_size, 576 or 656) kv_dtype
            rows [latent (512) | rotated part of the key (64)], those of query tokens included
        block_table : (batch, table_width) int32
            token t of sequence s is in page block_table[s, t // page_size], slot t % page_size
        kv_lens : (batch,) int32
            tokens of each sequence, new ones included
        cu_q : (batch + 1,) int32
            new tokens of sequence s are rows cu_q[s] : cu_q[s + 1]
        max_q : int, 1 by default
            upper bound of the query tokens of one sequence
        sm_scale : float
            factor of q . row, positive
        out : tuple of arrays (out, lse), optional
            where results go; allocated if left out

        Returns
        -------
        out : (tokens, heads, 512) dtype
            softmax-weighted sum of the visible latents; zeros where no row is visible
        lse : (tokens, heads) float32
            natural log of the softmax denominator; -inf where no row is visible

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are page_size: 1, 16, 64, 128; dtype: bfloat16, float16; kv_dtype: bfloat16, float16, uint8.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.
        Not checked
            Values of cu_q, kv_lens, block_table, but under kernelcat.debug().

        The definition: reference/flashmla.py and kernelcat.reference('flashmla').
        """
    def bind(  # type: ignore[override]
        self,
        q: Array,
        kv_cache: Array,
        block_table: Array,
        kv_lens: Array,
        cu_q: Array,
        *,
        max_q: int = ...,
        sm_scale: float,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class Fp8Gemm(Op):
    def __call__(  # type: ignore[override]
        self,
        a: Array,
        a_scale: Array,
        b: Array,
        b_scale: Array,
        *,
        out: Array | None = ...,
    ) -> Any:
        r"""fp8_gemm(a, a_scale, b, b_scale, out=None) -> out

        D = A @ B^T of float8_e4m3fn with block scales (A 1x128, B 128x128), bfloat16 out.

        Parameters
        ----------
        a : (M, K) dtype
            left operand A
        a_scale : (ceil(K/128), M) float32
            a_scale[j, m] multiplies A[m, 128 j : 128 (j + 1)]
        b : (N, K) dtype
            right operand B, which is multiplied transposed
        b_scale : (ceil(N/128), ceil(K/128)) float32
            b_scale[i, j] multiplies B[128 i : 128 (i + 1), 128 j : 128 (j + 1)]
        out : array, optional
            where results go; allocated if left out

        Returns
        -------
        d : (M, N) bfloat16
            the product D

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: float8_e4m3fn.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/fp8_gemm.py and kernelcat.reference('fp8_gemm').
        """
    def bind(  # type: ignore[override]
        self,
        a: Array,
        a_scale: Array,
        b: Array,
        b_scale: Array,
        *,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class Fp8Quantize(Op):
    def __call__(  # type: ignore[override]
        self,
        x: Array,
        *,
        block: Literal['1x128', '128x128'],
        out: tuple[Array | None, ...] | None = ...,
    ) -> tuple[Any, Any]:
        r"""fp8_quantize(x, block, out=None) -> q, scale

        Quantize to float8_e4m3fn with a float32 scale per 1x128 or 128x128, bit-exact.

        Parameters
        ----------
        x : (M, K) dtype
            matrix to quantize; must be finite
        block : one of '1x128', '128x128'
            rows x columns that share a scale
        out : tuple of arrays (q, scale), optional
            where results go; allocated if left out

        Returns
        -------
        q : (M, K) float8_e4m3fn
            x / scale, rounded to nearest
        scale : (ceil(K/128) or ceil(M/128), M or ceil(K/128)) float32
            max |x| of the block / 448; for 1x128 transposed, (k-blocks, rows), as fp8_gemm reads

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: bfloat16, float16; block: 1x128, 128x128.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.
        Not checked
            Values of x, but under kernelcat.debug().

        The definition: reference/fp8_quantize.py and kernelcat.reference('fp8_quantize').
        """
    def bind(  # type: ignore[override]
        self,
        x: Array,
        *,
        block: Literal['1x128', '128x128'],
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class Fp8Swiglu(Op):
    def __call__(  # type: ignore[override]
        self,
        x: Array,
        *,
        out: tuple[Array | None, ...] | None = ...,
    ) -> tuple[Any, Any]:
        r"""fp8_swiglu(x, out=None) -> q, scale

        silu(gate) * up quantized to float8_e4m3fn with a float32 scale per 1x128.

        Parameters
        ----------
        x : (M, N) dtype
            even columns are gates, odd columns the values that they gate; must be finite
        out : tuple of arrays (q, scale), optional
            where results go; allocated if left out

        Returns
        -------
        q : (M, N/2) float8_e4m3fn
            y / scale, where y = silu(x[:, ::2]) * x[:, 1::2]
        scale : (ceil(N/256), M) float32
            scale[j, m] = max |y[m, 128 j : 128 (j + 1)]| / 448, as fp8_gemm reads it

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: bfloat16, float16.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.
        Not checked
            Values of x, but under kernelcat.debug().

        The definition: reference/fp8_swiglu.py and kernelcat.reference('fp8_swiglu').
        """
    def bind(  # type: ignore[override]
        self,
        x: Array,
        *,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class Gemm(Op):
    def __call__(  # type: ignore[override]
        self,
        a: Array,
        b: Array,
        bias: Array | None = ...,
        residual: Array | None = ...,
        *,
        activation: Literal['none', 'silu', 'gelu', 'swiglu'] = ...,
        out: Array | None = ...,
    ) -> Any:
        r"""gemm(a, b, bias=None, residual=None, activation='none', out=None) -> out

        D = activation(A @ B^T + bias) + residual: dense matrix product.

        Parameters
        ----------
        a : (M, K) dtype
            left operand A
        b : (N, K) dtype
            right operand B, which is multiplied transposed
        bias : (N,) dtype, optional
            added to every row of A @ B^T
        residual : (M, N or N/2) dtype, optional
            added after the activation
        activation : one of 'none', 'silu', 'gelu', 'swiglu', 'none' by default
            function of the product plus bias; swiglu halves the columns
        out : array, optional
            where results go; allocated if left out

        Returns
        -------
        d : (M, N or N/2) dtype
            the result D

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: bfloat16, float16; bias: False, True; activation: none, silu, gelu, swiglu;
            residual: False, True.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/gemm.py and kernelcat.reference('gemm').
        """
    def bind(  # type: ignore[override]
        self,
        a: Array,
        b: Array,
        bias: Array | None = ...,
        residual: Array | None = ...,
        *,
        activation: Literal['none', 'silu', 'gelu', 'swiglu'] = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class KvTransfer(Op):
    def __call__(  # type: ignore[override]
        self,
        source_pages: Array,
        dest_ranks: Array,
        dest_pages: Array,
        *,
        caches: Literal[1, 2],
        out: tuple[Array | None, ...],
    ) -> tuple[Any, Any]:
        r"""kv_transfer(source_pages, dest_ranks, dest_pages, caches, out) -> k_cache, v_cache

        Pages of one rank's cache of keys and values to caches of other ranks, one-sided.

        Parameters
        ----------
        source_pages : (ranks, count) int32
            pages that are read
        dest_ranks : (ranks, count) int32
            the rank that gets each page; -1 for none
        dest_pages : (ranks, count) int32
            the page that it becomes there
        caches : one of 1, 2
            1: latent rows; 2: keys and values
        out : tuple of arrays (k_cache, v_cache)
            where results go; k_cache and v_cache must hold values, and is updated

        Returns
        -------
        k_cache : (ranks, pages, page_size, row) dtype
            keys, or latent rows
        v_cache : (ranks, pages, page_size, row) dtype, for caches 2
            values

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are caches: 1, 2; ranks: 2, 3, 4, 5, 6, 7, 8; dtype: bfloat16, float16, float8_e4m3fn,
            uint8.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/kv_transfer.py and kernelcat.reference('kv_transfer').
        """
    def bind(  # type: ignore[override]
        self,
        source_pages: Array,
        dest_ranks: Array,
        dest_pages: Array,
        *,
        caches: Literal[1, 2],
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class KvWrite(Op):
    def __call__(  # type: ignore[override]
        self,
        q: Array,
        k: Array,
        v: Array,
        block_table: Array,
        kv_lens: Array,
        cu_q: Array,
        cos_sin: Array,
        k_scale: Array | None = ...,
        v_scale: Array | None = ...,
        *,
        style: Literal['neox', 'interleaved'] = ...,
        page_scales: bool = ...,
        out: tuple[Array | None, ...],
    ) -> tuple[Any, Any, Any]:
        r"""kv_write(q, k, v, block_table, kv_lens, cu_q, cos_sin, k_scale=None, v_scale=None, style='neox',
            page_scales=False, out) -> q_out, k_cache, v_cache

        RoPE of queries and keys, and keys and values into a paged cache, in one pass.

        Parameters
        ----------
        q : (tokens, heads, head_dim) dtype
            queries of the new tokens, one sequence after another
        k : (tokens, kv_heads, head_dim) dtype
            keys of the new tokens
        v : (tokens, kv_heads, head_dim) dtype
            values of the new tokens
        block_table : (batch, table_width) int32
            token t of sequence s is in page block_table[s, t // page_size], slot t % page_size
        kv_lens : (batch,) int32
            tokens of each sequence, new ones included
        cu_q : (batch + 1,) int32
            new tokens of sequence s are rows cu_q[s] : cu_q[s + 1]
        cos_sin : (positions, rotary_dim) float32
            of each position rotary_dim / 2 cosines, then as many sines
        k_scale : (1 or pages, kv_heads) float32, optional
            k_cache times k_scale are the keys
        v_scale : (1 or pages, kv_heads) float32, optional
            v_cache times v_scale are the values
        style : one of 'neox', 'interleaved', 'neox' by default
            elements that are a pair: i and i + rotary_dim / 2, or 2 i and 2 i + 1
        page_scales : bool, False by default
            whether each page has its own k_scale and v_scale
        out : tuple of arrays (q_out, k_cache, v_cache)
            where results go; k_cache and v_cache must hold values, and is updated

        Returns
        -------
        q_out : (tokens, heads, head_dim) dtype
            rotated queries
        k_cache : (pages, page_size, kv_heads, head_dim or head_dim/2) kv_dtype
            slots of new tokens get rotated keys / k_scale
        v_cache : (pages, page_size, kv_heads, head_dim or head_dim/2) kv_dtype
            slots of new tokens get values / v_scale

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are head_dim: 64, 128, 256; page_size: 1, 16, 32, 64, 128; dtype: bfloat16, float16;
            kv_dtype: bfloat16, float16, float8_e4m3fn; style: neox, interleaved; has_scales: False,
            True; page_scales: False, True.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.
        Not checked
            Values of cu_q, kv_lens, block_table, but under kernelcat.debug().

        The definition: reference/kv_write.py and kernelcat.reference('kv_write').
        """
    def bind(  # type: ignore[override]
        self,
        q: Array,
        k: Array,
        v: Array,
        block_table: Array,
        kv_lens: Array,
        cu_q: Array,
        cos_sin: Array,
        k_scale: Array | None = ...,
        v_scale: Array | None = ...,
        *,
        style: Literal['neox', 'interleaved'] = ...,
        page_scales: bool = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class LmHead(Op):
    def __call__(  # type: ignore[override]
        self,
        x: Array,
        w: Array,
        *,
        top_k: int,
        has_logits: bool = ...,
        logits_dtype: Literal['float32', 'bfloat16', 'float16'] | Any = ...,
        out: tuple[Array | None, ...] | None = ...,
    ) -> tuple[Any, Any, Any]:
        r"""lm_head(x, w, top_k, has_logits=False, logits_dtype='float32', out=None) -> values, ids, logits

        The largest logits of x @ w^T and their tokens, without storing all logits.

        Parameters
        ----------
        x : (tokens, hidden) dtype
            hidden states
        w : (vocab, hidden) dtype
            weights of the head
        top_k : int
            tokens found for each row, at most 16
        has_logits : bool, False by default
            all logits are stored too
        logits_dtype : one of 'float32', 'bfloat16', 'float16', 'float32' by default
            element type of logits
        out : tuple of arrays (values, ids, logits), optional
            where results go; allocated if left out

        Returns
        -------
        values : (tokens, top_k) float32
            largest logits, falling
        ids : (tokens, top_k) int32
            their tokens; of equal logits the lower id first
        logits : (tokens, vocab) logits_dtype, optional
            all logits

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: bfloat16, float16; has_logits: False, True; logits_dtype: float32, bfloat16,
            float16.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/lm_head.py and kernelcat.reference('lm_head').
        """
    def bind(  # type: ignore[override]
        self,
        x: Array,
        w: Array,
        *,
        top_k: int,
        has_logits: bool = ...,
        logits_dtype: Literal['float32', 'bfloat16', 'float16'] | Any = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class MlaKvWrite(Op):
    def __call__(  # type: ignore[override]
        self,
        c: Array,
        k_pe: Array,
        block_table: Array,
        kv_lens: Array,
        cu_q: Array,
        cos_sin: Array,
        *,
        style: Literal['neox', 'interleaved'] = ...,
        out: Array,
    ) -> Any:
        r"""mla_kv_write(c, k_pe, block_table, kv_lens, cu_q, cos_sin, style='interleaved', out) -> out

        RoPE, and new rows into a paged latent cache, quantized or not, in one pass.

        Parameters
        ----------
        c : (tokens, 512) dtype
            normalized latents of the new tokens
        k_pe : (tokens, 64) dtype
            parts of the keys that RoPE rotates
        block_table : (batch, table_width) int32
            token t of sequence s is in page block_table[s, t // page_size], slot t % page_size
        kv_lens : (batch,) int32
            tokens of each sequence, new ones included
        cu_q : (batch + 1,) int32
            new tokens of sequence s are rows cu_q[s] : cu_q[s + 1]
        cos_sin : (positions, rotary_dim) float32
            of each position rotary_dim / 2 cosines, then as many sines
        style : one of 'neox', 'interleaved', 'interleaved' by default
            elements that are a pair: i and i + rotary_dim / 2, or 2 i and 2 i + 1
        out : array
            where results go; out must hold values, and is updated

        Returns
        -------
        kv_cache : (pages, page_size, 576 or 656) kv_dtype
            slots of new tokens get rows [c (512) | rotated k_pe (64)]

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are rotary_dim: 0, 64; page_size: 1, 16, 64, 128; dtype: bfloat16, float16; kv_dtype:
            bfloat16, float16, uint8; style: neox, interleaved.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.
        Not checked
            Values of cu_q, kv_lens, block_table, but under kernelcat.debug().

        The definition: reference/mla_kv_write.py and kernelcat.reference('mla_kv_write').
        """
    def bind(  # type: ignore[override]
        self,
        c: Array,
        k_pe: Array,
        block_table: Array,
        kv_lens: Array,
        cu_q: Array,
        cos_sin: Array,
        *,
        style: Literal['neox', 'interleaved'] = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class MoeCombine(Op):
    def __call__(  # type: ignore[override]
        self,
        sums: Array,
        row_of: Array,
        expert_ids: Array,
        residual: Array | None = ...,
        *,
        local_experts: int,
        out: Array | None = ...,
    ) -> Any:
        r"""moe_combine(sums, row_of, expert_ids, residual=None, local_experts, out=None) -> out

        Results of experts on several ranks back to the tokens' ranks, added up in order.

        Parameters
        ----------
        sums : (ranks, ranks*tokens, hidden) dtype
            weighted sums of a rank's experts
        row_of : (ranks, ranks, tokens) int32
            row_of[r, s, t]: the row of token t of rank s at rank r; -1 where it does not come
        expert_ids : (ranks, tokens, top_k) int32
            experts of each rank's tokens, counted over all ranks; -1 for none
        residual : (ranks, tokens, hidden) dtype, optional
            added first
        local_experts : int
            experts that each rank holds
        out : array, optional
            where results go; allocated if left out

        Returns
        -------
        out : (ranks, tokens, hidden) dtype
            the sums of all ranks

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are ranks: 2, 3, 4, 5, 6, 7, 8; dtype: bfloat16, float16; residual: False, True.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/moe_combine.py and kernelcat.reference('moe_combine').
        """
    def bind(  # type: ignore[override]
        self,
        sums: Array,
        row_of: Array,
        expert_ids: Array,
        residual: Array | None = ...,
        *,
        local_experts: int,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class MoeDispatch(Op):
    def __call__(  # type: ignore[override]
        self,
        x: Array,
        expert_ids: Array,
        weights: Array,
        *,
        local_experts: int,
        out: tuple[Array | None, ...],
    ) -> tuple[Any, Any, Any, Any, Any, Any, Any, Any]:
        r"""moe_dispatch(x, expert_ids, weights, local_experts, out) -> rows, gates, row_of, source_offsets,
            offsets, order, position, scale

        Tokens to the ranks that hold their experts, with index maps for grouped products.

        Parameters
        ----------
        x : (ranks, tokens, hidden) dtype
            activations; finite for float8
        expert_ids : (ranks, tokens, top_k) int32
            experts of each rank's tokens, counted over all ranks; -1 for none
        weights : (ranks, tokens, top_k) float32
            weights of a token's experts
        local_experts : int
            experts that each rank holds
        out : tuple of arrays (rows, gates, row_of, source_offsets, offsets, order, position, scale)
            where results go; rows and gates and scale must hold values, and is updated

        Returns
        -------
        rows : (ranks, ranks*tokens, hidden) act_dtype
            activations that have come
        gates : (ranks, ranks*tokens, top_k) float32
            weights by row
        row_of : (ranks, ranks, tokens) int32
            row_of[r, s, t]: the row of token t of rank s at rank r; -1 where it does not come
        source_offsets : (ranks, ranks+1) int32
            rows source_offsets[r, s] to source_offsets[r, s + 1] - 1 of rank r come from rank s
        offsets : (ranks, local_experts+1) int32
            expert e of rank r serves the assignments offsets[r, e] to offsets[r, e + 1] - 1
        order : (ranks, ranks*tokens*top_k) int32
            assignments (row * top_k + slot) sorted by expert; -1 after the last
        position : (ranks, ranks*tokens, top_k) int32
            where in order an assignment stands; -1 for experts of other ranks, and other rows
        scale : (ranks, ceil(hidden/128), ranks*tokens) float32, for act_dtype float8_e4m3fn
            scales of rows in float8, a row for each 128 columns

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are ranks: 2, 3, 4, 5, 6, 7, 8; dtype: bfloat16, float16; act_dtype: bfloat16, float16,
            float8_e4m3fn.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/moe_dispatch.py and kernelcat.reference('moe_dispatch').
        """
    def bind(  # type: ignore[override]
        self,
        x: Array,
        expert_ids: Array,
        weights: Array,
        *,
        local_experts: int,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class MoeGemm(Op):
    def __call__(  # type: ignore[override]
        self,
        a: Array,
        w: Array,
        offsets: Array,
        order: Array,
        w_scale: Array | None = ...,
        w_global_scale: Array | None = ...,
        bias: Array | None = ...,
        a_scale: Array | None = ...,
        position: Array | None = ...,
        gates: Array | None = ...,
        residual: Array | None = ...,
        *,
        tokens: int = ...,
        top_k: int = ...,
        dtype: Literal['bfloat16', 'float16'] | Any = ...,
        format: Literal['bfloat16', 'float16', 'fp8', 'mxfp4', 'nvfp4'] = ...,
        packing: Literal['rows', 'tiles'] = ...,
        gather: bool = ...,
        activation: Literal['none', 'swiglu', 'swiglu_oai'] = ...,
        out: Array | None = ...,
    ) -> Any:
        r"""moe_gemm(a, w, offsets, order, w_scale=None, w_global_scale=None, bias=None, a_scale=None,
            position=None, gates=None, residual=None, tokens=..., top_k=..., dtype=..., format=...,
            packing='rows', gather=False, activation='none', out=None) -> out

        Products of rows grouped by expert; gather, bias, SwiGLU and weighted sum are fused.

        Parameters
        ----------
        a : (tokens or tokens*top_k, K) act_dtype
            activations
        w : (experts, rows of w, columns of w) bfloat16 (bfloat16) or float16 (float16) or float8_e4m3fn
          (fp8) or float4_e2m1fn_x2 (mxfp4) or float4_e2m1fn_x2 (nvfp4)
            weights
        offsets : (experts+1,) int32
            expert e serves rows offsets[e] to offsets[e + 1] - 1
        order : (tokens*top_k,) int32
            row -> token * top_k + slot, or -1
        w_scale : (experts, rows of w_scale, columns of w_scale) float32 (fp8) or float8_e8m0fnu (mxfp4)
          or float8_e4m3fn (nvfp4), for format fp8 or mxfp4 or nvfp4
            scales of the weights
        w_global_scale : (experts,) float32, for format nvfp4
            factor of each expert's weights
        bias : (experts, rows of w) dtype, optional
            added to each row of the product
        a_scale : (ceil(K/128), tokens or tokens*top_k) float32, for act_dtype float8_e4m3fn
            a_scale[j, m] multiplies A[m, 128 j : 128 (j + 1)]
        position : (tokens, top_k) int32, optional
            assignment -> row, or -1
        gates : (tokens, top_k) float32, optional
            weights of the sum
        residual : (tokens, N or N/2) dtype, optional
            added to the sums
        tokens : int, needed where no optional array tells it
            tokens
        top_k : int, needed where no optional array tells it
            experts that serve a token
        dtype : one of 'bfloat16', 'float16', needed where no optional array tells it
            element type of biases and the result
        format : one of 'bfloat16', 'float16', 'fp8', 'mxfp4', 'nvfp4', needed where no optional array
          tells it
            number format of the weights
        packing : one of 'rows', 'tiles', 'rows' by default
            order of 4-bit weights: rows, or tiles that fp4.prepack makes
        gather : bool, False by default
            rows of A are tokens; else they are grouped by expert
        activation : one of 'none', 'swiglu', 'swiglu_oai', 'none' by default
            function of the product plus bias; both SwiGLU halve the columns
        out : array, optional
            where results go; allocated if left out

        Returns
        -------
        d : (tokens*top_k or tokens, N or N/2) dtype
            the result D

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: bfloat16, float16; format: bfloat16, float16, fp8, mxfp4, nvfp4; act_dtype:
            bfloat16, float16, float8_e4m3fn; packing: rows, tiles; gather: False, True; combine: False,
            True; bias: False, True; residual: False, True; activation: none, swiglu, swiglu_oai.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.
        Not checked
            Values of offsets, order, position, but under kernelcat.debug().

        The definition: reference/moe_gemm.py and kernelcat.reference('moe_gemm').
        """
    def bind(  # type: ignore[override]
        self,
        a: Array,
        w: Array,
        offsets: Array,
        order: Array,
        w_scale: Array | None = ...,
        w_global_scale: Array | None = ...,
        bias: Array | None = ...,
        a_scale: Array | None = ...,
        position: Array | None = ...,
        gates: Array | None = ...,
        residual: Array | None = ...,
        *,
        tokens: int = ...,
        top_k: int = ...,
        dtype: Literal['bfloat16', 'float16'] | Any = ...,
        format: Literal['bfloat16', 'float16', 'fp8', 'mxfp4', 'nvfp4'] = ...,
        packing: Literal['rows', 'tiles'] = ...,
        gather: bool = ...,
        activation: Literal['none', 'swiglu', 'swiglu_oai'] = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class MoeMlp(Op):
    def __call__(  # type: ignore[override]
        self,
        x: Array,
        logits: Array,
        w1: Array,
        w2: Array,
        correction: Array | None = ...,
        w1_scale: Array | None = ...,
        w1_global_scale: Array | None = ...,
        bias1: Array | None = ...,
        w2_scale: Array | None = ...,
        w2_global_scale: Array | None = ...,
        bias2: Array | None = ...,
        residual: Array | None = ...,
        *,
        top_k: int,
        format: Literal['bfloat16', 'float16', 'fp8', 'mxfp4', 'nvfp4'] = ...,
        act_dtype: Literal['bfloat16', 'float16', 'float8_e4m3fn'] | Any,
        packing: Literal['rows', 'tiles'] = ...,
        activation: Literal['swiglu', 'swiglu_oai'],
        score: Literal['softmax', 'sigmoid'] = ...,
        renormalize: bool = ...,
        groups: int = ...,
        top_groups: int = ...,
        scaling: float = ...,
        out: Array | None = ...,
    ) -> Any:
        r"""moe_mlp(x, logits, w1, w2, correction=None, w1_scale=None, w1_global_scale=None, bias1=None,
            w2_scale=None, w2_global_scale=None, bias2=None, residual=None, top_k, format=...,
            act_dtype, packing='rows', activation, score='softmax', renormalize=False, groups=1,
            top_groups=1, scaling=1.0, out=None) -> out

        The experts of a mixture-of-experts layer: routing, both products and weighted sum.

        Parameters
        ----------
        x : (tokens, hidden) dtype
            activations
        logits : (tokens, experts) logit_dtype
            the router's logits
        w1 : (experts, rows of w1, columns of w1) bfloat16 (bfloat16) or float16 (float16) or
          float8_e4m3fn (fp8) or float4_e2m1fn_x2 (mxfp4) or float4_e2m1fn_x2 (nvfp4)
            weights
        w2 : (experts, rows of w2, columns of w2) bfloat16 (bfloat16) or float16 (float16) or
          float8_e4m3fn (fp8) or float4_e2m1fn_x2 (mxfp4) or float4_e2m1fn_x2 (nvfp4)
            weights
        correction : (experts,) float32, optional
            added to scores to select, not to weigh
        w1_scale : (experts, rows of w1_scale, columns of w1_scale) float32 (fp8) or float8_e8m0fnu
          (mxfp4) or float8_e4m3fn (nvfp4), for format fp8 or mxfp4 or nvfp4
            scales of the weights
        w1_global_scale : (experts,) float32, for format nvfp4
            factor of each expert's weights
        bias1 : (experts, rows of w1) dtype, optional
            added to each row of the product
        w2_scale : (experts, rows of w2_scale, columns of w2_scale) float32 (fp8) or float8_e8m0fnu
          (mxfp4) or float8_e4m3fn (nvfp4), for format fp8 or mxfp4 or nvfp4
            scales of the weights
        w2_global_scale : (experts,) float32, for format nvfp4
            factor of each expert's weights
        bias2 : (experts, rows of w2) dtype, optional
            added to each row of the product
        residual : (tokens, hidden) dtype, optional
            added to the output
        top_k : int
            experts that serve a token
        format : one of 'bfloat16', 'float16', 'fp8', 'mxfp4', 'nvfp4', needed where no optional array
          tells it
            number format of the weights
        act_dtype : one of 'bfloat16', 'float16', 'float8_e4m3fn'
            element type of activations that are multiplied
        packing : one of 'rows', 'tiles', 'rows' by default
            order of 4-bit weights: rows, or tiles that fp4.prepack makes
        activation : one of 'swiglu', 'swiglu_oai'
            function of the first product
        score : one of 'softmax', 'sigmoid', 'softmax' by default
            function of logits that makes scores
        renormalize : bool, False by default
            whether the weights of a token add up to 1
        groups : int, 1 by default
            groups of experts
        top_groups : int, 1 by default
            groups that a token may select from
        scaling : float, 1.0 by default
            factor of all weights
        out : array, optional
            where results go; allocated if left out

        Returns
        -------
        out : (tokens, hidden) dtype
            the layer's output

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: bfloat16, float16; format: bfloat16, float16, fp8, mxfp4, nvfp4; act_dtype:
            bfloat16, float16, float8_e4m3fn; packing: rows, tiles; bias: False, True; residual: False,
            True; activation: swiglu, swiglu_oai; logit_dtype: float32, bfloat16, float16; score:
            softmax, sigmoid; renormalize: False, True; correction: False, True.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/moe_mlp.py and kernelcat.reference('moe_mlp').
        """
    def bind(  # type: ignore[override]
        self,
        x: Array,
        logits: Array,
        w1: Array,
        w2: Array,
        correction: Array | None = ...,
        w1_scale: Array | None = ...,
        w1_global_scale: Array | None = ...,
        bias1: Array | None = ...,
        w2_scale: Array | None = ...,
        w2_global_scale: Array | None = ...,
        bias2: Array | None = ...,
        residual: Array | None = ...,
        *,
        top_k: int,
        format: Literal['bfloat16', 'float16', 'fp8', 'mxfp4', 'nvfp4'] = ...,
        act_dtype: Literal['bfloat16', 'float16', 'float8_e4m3fn'] | Any,
        packing: Literal['rows', 'tiles'] = ...,
        activation: Literal['swiglu', 'swiglu_oai'],
        score: Literal['softmax', 'sigmoid'] = ...,
        renormalize: bool = ...,
        groups: int = ...,
        top_groups: int = ...,
        scaling: float = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class MoeRoute(Op):
    def __call__(  # type: ignore[override]
        self,
        logits: Array | None = ...,
        x: Array | None = ...,
        router: Array | None = ...,
        router_bias: Array | None = ...,
        correction: Array | None = ...,
        *,
        tokens: int = ...,
        experts: int = ...,
        top_k: int,
        dtype: Literal['float32', 'bfloat16', 'float16'] | Any = ...,
        hidden: int = ...,
        score: Literal['softmax', 'sigmoid'] = ...,
        renormalize: bool = ...,
        groups: int = ...,
        top_groups: int = ...,
        scaling: float = ...,
        capacity_factor: float = ...,
        overflow: Literal['drop', 'reroute'] = ...,
        out: tuple[Array | None, ...] | None = ...,
    ) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
        r"""moe_route(logits=None, x=None, router=None, router_bias=None, correction=None, tokens=...,
            experts=..., top_k, dtype=..., hidden=0, score='softmax', renormalize=False, groups=1,
            top_groups=1, scaling=1.0, capacity_factor=0.0, overflow='drop', out=None) -> expert_ids,
            weights, counts, offsets, order, position, load

        Router logits to expert ids, weights, and index maps sorted by expert, in one launch.

        Parameters
        ----------
        logits : (tokens, experts) dtype, for product False
            the router's output
        x : (tokens, hidden) dtype, optional
            rows of the router's product
        router : (experts, hidden) dtype, optional
            the router's weights
        router_bias : (experts,) dtype, optional
            added to the product
        correction : (experts,) float32, optional
            added before selecting
        tokens : int, needed where no optional array tells it
            tokens
        experts : int, needed where no optional array tells it
            experts that a token selects from, 1 to 512
        top_k : int
            experts that a token selects, 1 to 16
        dtype : one of 'float32', 'bfloat16', 'float16', needed where no optional array tells it
            element type of logits, or of x and the router
        hidden : int, 0 by default
            elements of a row of x; unused where logits are given
        score : one of 'softmax', 'sigmoid', 'softmax' by default
            what weights are made of
        renormalize : bool, False by default
            whether a token's weights sum to scaling
        groups : int, 1 by default
            groups of experts, 1 to 32
        top_groups : int, 1 by default
            groups that a token selects from; all where there are no more
        scaling : float, 1.0 by default
            factor of all weights
        capacity_factor : float, 0.0 by default
            capacity relative to equal loads; 0: no limit
        overflow : one of 'drop', 'reroute', 'drop' by default
            what happens to assignments beyond the capacity
        out : tuple of arrays (expert_ids, weights, counts, offsets, order, position, load), optional
            where results go; allocated if left out

        Returns
        -------
        expert_ids : (tokens, top_k) int32
            selected experts by descending selection score; -1 where dropped
        weights : (tokens, top_k) float32
            their weights; 0 where dropped
        counts : (experts,) int32
            assignments that an expert serves
        offsets : (experts + 1,) int32
            exclusive prefix sums of counts
        order : (tokens * top_k,) int32
            assignments sorted by expert, then by index; -1 from offsets[experts] on
        position : (tokens, top_k) int32
            where in order the assignment stands; -1 where dropped
        load : (experts,) int32, optional
            gets assignments before the capacity limit added

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: float32, bfloat16, float16; product: False, True; score: softmax, sigmoid;
            renormalize: False, True; correction: False, True; router_bias: False, True; overflow: drop,
            reroute; load: False, True.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.
        Not checked
            Values of logits, but under kernelcat.debug().

        The definition: reference/moe_route.py and kernelcat.reference('moe_route').
        """
    def bind(  # type: ignore[override]
        self,
        logits: Array | None = ...,
        x: Array | None = ...,
        router: Array | None = ...,
        router_bias: Array | None = ...,
        correction: Array | None = ...,
        *,
        tokens: int = ...,
        experts: int = ...,
        top_k: int,
        dtype: Literal['float32', 'bfloat16', 'float16'] | Any = ...,
        hidden: int = ...,
        score: Literal['softmax', 'sigmoid'] = ...,
        renormalize: bool = ...,
        groups: int = ...,
        top_groups: int = ...,
        scaling: float = ...,
        capacity_factor: float = ...,
        overflow: Literal['drop', 'reroute'] = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class MulticastGemm(Op):
    def __call__(  # type: ignore[override]
        self,
        a: Array,
        b: Array,
        *,
        out: Array | None = ...,
    ) -> Any:
        r"""multicast_gemm(a, b, out=None) -> out

        D = A @ B^T by thread block clusters that share operands: what multicast buys.

        Parameters
        ----------
        a : (M, K) dtype
            left operand A
        b : (N, K) dtype
            right operand B, which is multiplied transposed
        out : array, optional
            where results go; allocated if left out

        Returns
        -------
        d : (M, N) dtype
            the product D

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: bfloat16, float16.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/multicast_gemm.py and kernelcat.reference('multicast_gemm').
        """
    def bind(  # type: ignore[override]
        self,
        a: Array,
        b: Array,
        *,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class Nvfp4Dequantize(Op):
    def __call__(  # type: ignore[override]
        self,
        q: Array,
        scale: Array,
        global_scale: Array | None = ...,
        *,
        dtype: Literal['bfloat16', 'float16', 'float32'] | Any = ...,
        scale_layout: Literal['linear', 'swizzled'] = ...,
        out: Array | None = ...,
    ) -> Any:
        r"""nvfp4_dequantize(q, scale, global_scale=None, dtype='bfloat16', scale_layout='linear', out=None)
            -> out

        NVFP4 or MXFP4 with linear or swizzled scales back to 16 or 32 bits, bit-exact.

        Parameters
        ----------
        q : (M, K/2) float4_e2m1fn_x2
            E2M1 codes, two in a byte: the even column in the low half
        scale : (M padded to 128 if swizzled, K/16 or K/32 padded to 4 if swizzled) float8_e4m3fn
          (nvfp4) or float8_e8m0fnu (mxfp4)
            factor of each 16 (nvfp4) or 32 (mxfp4) elements of a row
        global_scale : (1,) float32, for format nvfp4
            NVFP4: factor of all values, 2^-64 to 2^64
        dtype : one of 'bfloat16', 'float16', 'float32', 'bfloat16' by default
            element type of x
        scale_layout : one of 'linear', 'swizzled', 'linear' by default
            order of the scales: rows, or tiles of 128 x 4 as cuBLASLt reads them
        out : array, optional
            where results go; allocated if left out

        Returns
        -------
        x : (M, K) dtype
            e2m1 * scale * global_scale

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: bfloat16, float16, float32; format: nvfp4, mxfp4; scale_layout: linear, swizzled.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/nvfp4_dequantize.py and kernelcat.reference('nvfp4_dequantize').
        """
    def bind(  # type: ignore[override]
        self,
        q: Array,
        scale: Array,
        global_scale: Array | None = ...,
        *,
        dtype: Literal['bfloat16', 'float16', 'float32'] | Any = ...,
        scale_layout: Literal['linear', 'swizzled'] = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class Nvfp4Matmul(Op):
    def __call__(  # type: ignore[override]
        self,
        a: Array,
        w: Array,
        w_scale: Array,
        global_scale: Array | None = ...,
        a_scale: Array | None = ...,
        a_block_scale: Array | None = ...,
        bias: Array | None = ...,
        *,
        N: int = ...,
        packing: Literal['rows', 'tiles'] = ...,
        activation: Literal['none', 'silu', 'gelu', 'swiglu'] = ...,
        out: Array | None = ...,
    ) -> Any:
        r"""nvfp4_matmul(a, w, w_scale, global_scale=None, a_scale=None, a_block_scale=None, bias=None,
            N=..., packing='rows', activation='none', out=None) -> out

        D = activation(A @ W^T + bias), weights in NVFP4 or MXFP4, A in 16, 8 or 4 bits.

        Parameters
        ----------
        a : (M, K, or K/2 in 4 bits) dtype
            left operand A; in 4 bits E2M1 codes, two in a byte
        w : (N padded to 16 in tiles, K/2 padded to 32 in tiles) float4_e2m1fn_x2
            E2M1 codes of the weights W, two in a byte
        w_scale : (N padded to 16 in tiles or to 128 if swizzled, K/16 or K/32 (K padded to 64 in tiles;
          the quotient to 4 if swizzled)) float8_e4m3fn (nvfp4) or float8_e8m0fnu (mxfp4)
            factor of each 16 (nvfp4) or 32 (mxfp4) elements of a row of W
        global_scale : (1,) float32, for format nvfp4
            NVFP4: factor of A @ W^T; W's global scale, times A's if A is in 4 bits
        a_scale : (M,) float32, for dtype float8_e4m3fn
            factor of each row of A in float8
        a_block_scale : (M padded to 128, K/16 or K/32 padded to 4) float8_e4m3fn (nvfp4) or
          float8_e8m0fnu (mxfp4), for dtype float4_e2m1fn_x2
            factor of each 16 or 32 elements of a row of A in 4 bits, swizzled
        bias : (N,) bfloat16 (bfloat16) or float16 (float16) or bfloat16 (float8_e4m3fn) or bfloat16
          (float4_e2m1fn_x2), optional
            added to every row of the scaled product
        N : int, needed where no optional array tells it
            rows of W; columns of D (N / 2 for swiglu)
        packing : one of 'rows', 'tiles', 'rows' by default
            order of w and w_scale: rows, or tiles that fp4.prepack makes
        activation : one of 'none', 'silu', 'gelu', 'swiglu', 'none' by default
            function of the product plus bias; swiglu halves the columns
        out : array, optional
            where results go; allocated if left out

        Returns
        -------
        d : (M, N or N/2) bfloat16 (bfloat16) or float16 (float16) or bfloat16 (float8_e4m3fn) or
          bfloat16 (float4_e2m1fn_x2)
            the result D

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: bfloat16, float16, float8_e4m3fn, float4_e2m1fn_x2; format: nvfp4, mxfp4;
            packing: rows, tiles; bias: False, True; activation: none, silu, gelu, swiglu.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/nvfp4_matmul.py and kernelcat.reference('nvfp4_matmul').
        """
    def bind(  # type: ignore[override]
        self,
        a: Array,
        w: Array,
        w_scale: Array,
        global_scale: Array | None = ...,
        a_scale: Array | None = ...,
        a_block_scale: Array | None = ...,
        bias: Array | None = ...,
        *,
        N: int = ...,
        packing: Literal['rows', 'tiles'] = ...,
        activation: Literal['none', 'silu', 'gelu', 'swiglu'] = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class Nvfp4Quantize(Op):
    def __call__(  # type: ignore[override]
        self,
        x: Array,
        global_scale: Array | None = ...,
        weight: Array | None = ...,
        signs: Array | None = ...,
        seed: Array | None = ...,
        *,
        format: Literal['nvfp4', 'mxfp4'] = ...,
        scale_layout: Literal['linear', 'swizzled'] = ...,
        eps: float = ...,
        out: tuple[Array | None, ...] | None = ...,
    ) -> tuple[Any, Any]:
        r"""nvfp4_quantize(x, global_scale=None, weight=None, signs=None, seed=None, format='nvfp4',
            scale_layout='linear', eps=1e-05, out=None) -> q, scale

        Quantize to NVFP4 or MXFP4, bit-exact; RMSNorm, Hadamard, stochastic rounding.

        Parameters
        ----------
        x : (M, K) dtype
            matrix to quantize
        global_scale : (1,) float32, for format nvfp4
            NVFP4: factor of all values when they are read, 2^-64 to 2^64
        weight : (K,) dtype, optional
            factor of each column after RMSNorm
        signs : (16,) float32, optional
            +1 or -1: factors before the Hadamard transform
        seed : (2,) int32, optional
            key of the random numbers (Philox)
        format : one of 'nvfp4', 'mxfp4', 'nvfp4' by default
            format of q and scale
        scale_layout : one of 'linear', 'swizzled', 'linear' by default
            order of the scales: rows, or tiles of 128 x 4 as cuBLASLt reads them
        eps : float, 1e-05 by default
            RMSNorm's epsilon, at least 1e-12
        out : tuple of arrays (q, scale), optional
            where results go; allocated if left out

        Returns
        -------
        q : (M, K/2) float4_e2m1fn_x2
            E2M1 codes, two in a byte: the even column in the low half
        scale : (M padded to 128 if swizzled, K/16 or K/32 padded to 4 if swizzled) float8_e4m3fn
          (nvfp4) or float8_e8m0fnu (mxfp4)
            factor of each 16 (nvfp4) or 32 (mxfp4) elements of a row

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: bfloat16, float16; format: nvfp4, mxfp4; scale_layout: linear, swizzled;
            rms_norm: False, True; hadamard: False, True; stochastic: False, True.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/nvfp4_quantize.py and kernelcat.reference('nvfp4_quantize').
        """
    def bind(  # type: ignore[override]
        self,
        x: Array,
        global_scale: Array | None = ...,
        weight: Array | None = ...,
        signs: Array | None = ...,
        seed: Array | None = ...,
        *,
        format: Literal['nvfp4', 'mxfp4'] = ...,
        scale_layout: Literal['linear', 'swizzled'] = ...,
        eps: float = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class OutRouter(Op):
    def __call__(  # type: ignore[override]
        self,
        attn: Array,
        wo: Array,
        norm_weight: Array,
        router: Array | None = ...,
        bo: Array | None = ...,
        router_bias: Array | None = ...,
        *,
        experts: int = ...,
        eps: float = ...,
        out: tuple[Array | None, ...],
    ) -> tuple[Any, Any, Any]:
        r"""out_router(attn, wo, norm_weight, router=None, bo=None, router_bias=None, experts=0, eps=1e-05,
            out) -> x, logits, residual

        Attention's output projection, residual, RMSNorm and the router's logits, fused.

        Parameters
        ----------
        attn : (tokens, width) dtype
            results of attention, all heads of a token
        wo : (hidden, width) dtype
            weights of the output projection
        norm_weight : (hidden,) dtype
            factor of each column after RMSNorm
        router : (experts, hidden) dtype, optional
            the router's weights
        bo : (hidden,) dtype, optional
            added to the output projection
        router_bias : (experts,) dtype, optional
            added to the logits
        experts : int, 0 by default
            rows of the router; 0 without a router
        eps : float, 1e-05 by default
            added to the mean square
        out : tuple of arrays (x, logits, residual)
            where results go; residual must hold values, and is updated

        Returns
        -------
        x : (tokens, hidden) dtype
            the normalized rows: the experts' input
        logits : (tokens, experts) float32, optional
            the router's output
        residual : (tokens, hidden) dtype
            h = residual + wo attn + bo takes its place

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: bfloat16, float16; has_router: False, True; bias: False, True; router_bias:
            False, True.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/out_router.py and kernelcat.reference('out_router').
        """
    def bind(  # type: ignore[override]
        self,
        attn: Array,
        wo: Array,
        norm_weight: Array,
        router: Array | None = ...,
        bo: Array | None = ...,
        router_bias: Array | None = ...,
        *,
        experts: int = ...,
        eps: float = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class PagedAttn(Op):
    def __call__(  # type: ignore[override]
        self,
        q: Array,
        k_cache: Array,
        v_cache: Array,
        block_table: Array,
        kv_lens: Array,
        cu_q: Array,
        sinks: Array | None = ...,
        k_scale: Array | None = ...,
        v_scale: Array | None = ...,
        k_block_scale: Array | None = ...,
        v_block_scale: Array | None = ...,
        *,
        max_q: int = ...,
        window: int = ...,
        sm_scale: float = ...,
        softcap: float = ...,
        page_scales: bool = ...,
        out: tuple[Array | None, ...] | None = ...,
    ) -> tuple[Any, Any]:
        r"""paged_attn(q, k_cache, v_cache, block_table, kv_lens, cu_q, sinks=None, k_scale=None,
            v_scale=None, k_block_scale=None, v_block_scale=None, max_q=1, window=0, sm_scale=0.0,
            softcap=0.0, page_scales=False, out=None) -> out, lse

        Attention of new tokens over a paged cache of keys and values, and its log-sum-exp.

        Parameters
        ----------
        q : (tokens, heads, head_dim) dtype
            queries, one sequence after another
        k_cache : (pages, page_size, kv_heads, head_dim or head_dim/2) kv_dtype
            cached keys, those of the query tokens included
        v_cache : (pages, page_size, kv_heads, head_dim or head_dim/2) kv_dtype
            cached values, those of the query tokens included
        block_table : (batch, table_width) int32
            token t of sequence s is in page block_table[s, t // page_size], slot t % page_size
        kv_lens : (batch,) int32
            tokens of each sequence, new ones included
        cu_q : (batch + 1,) int32
            new tokens of sequence s are rows cu_q[s] : cu_q[s + 1]
        sinks : (heads,) float32, optional
            one more logit for each head in the softmax, without a value
        k_scale : (1 or pages, kv_heads) float32, optional
            k_cache times k_scale are the keys
        v_scale : (1 or pages, kv_heads) float32, optional
            v_cache times v_scale are the values
        k_block_scale : (pages, page_size, kv_heads, head_dim/16) float8_e4m3fn, for kv_dtype
          float4_e2m1fn_x2
            NVFP4: multiplies 16 elements of a key
        v_block_scale : (pages, page_size, kv_heads, head_dim/16) float8_e4m3fn, for kv_dtype
          float4_e2m1fn_x2
            NVFP4: multiplies 16 elements of a value
        max_q : int, 1 by default
            upper bound of the query tokens of one sequence
        window : int, 0 by default
            tokens that a query attends to, its own included; 0: all before it
        sm_scale : float, 0.0 by default
            factor of q . k; 0: 1 / sqrt(head_dim)
        softcap : float, 0.0 by default
            scores become softcap * tanh(z / softcap); 0: no cap
        page_scales : bool, False by default
            whether each page has its own k_scale and v_scale
        out : tuple of arrays (out, lse), optional
            where results go; allocated if left out

        Returns
        -------
        out : (tokens, heads, head_dim) dtype
            softmax-weighted sum of the visible values; zeros where no key is visible
        lse : (tokens, heads) float32
            natural log of the softmax denominator; -inf where no key is visible, without sinks

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are head_dim: 64, 128, 256; page_size: 1, 16, 32, 64, 128; dtype: bfloat16, float16;
            kv_dtype: bfloat16, float16, float8_e4m3fn, float4_e2m1fn_x2; has_sinks: False, True;
            has_scales: False, True; page_scales: False, True.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.
        Not checked
            Values of cu_q, kv_lens, block_table, but under kernelcat.debug().

        The definition: reference/paged_attn.py and kernelcat.reference('paged_attn').
        """
    def bind(  # type: ignore[override]
        self,
        q: Array,
        k_cache: Array,
        v_cache: Array,
        block_table: Array,
        kv_lens: Array,
        cu_q: Array,
        sinks: Array | None = ...,
        k_scale: Array | None = ...,
        v_scale: Array | None = ...,
        k_block_scale: Array | None = ...,
        v_block_scale: Array | None = ...,
        *,
        max_q: int = ...,
        window: int = ...,
        sm_scale: float = ...,
        softcap: float = ...,
        page_scales: bool = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class QkvRopeWrite(Op):
    def __call__(  # type: ignore[override]
        self,
        x: Array,
        norm_weight: Array,
        wq: Array,
        wk: Array,
        wv: Array,
        block_table: Array,
        kv_lens: Array,
        cu_q: Array,
        cos_sin: Array,
        bq: Array | None = ...,
        bk: Array | None = ...,
        bv: Array | None = ...,
        k_scale: Array | None = ...,
        v_scale: Array | None = ...,
        *,
        style: Literal['neox', 'interleaved'] = ...,
        page_scales: bool = ...,
        eps: float = ...,
        out: tuple[Array | None, ...],
    ) -> tuple[Any, Any, Any]:
        r"""qkv_rope_write(x, norm_weight, wq, wk, wv, block_table, kv_lens, cu_q, cos_sin, bq=None,
            bk=None, bv=None, k_scale=None, v_scale=None, style='neox', page_scales=False, eps=1e-05,
            out) -> q_out, k_cache, v_cache

        RMSNorm, projections to queries, keys and values, RoPE and the cache write, fused.

        Parameters
        ----------
        x : (tokens, hidden) dtype
            residual stream of the new tokens, one sequence after another
        norm_weight : (hidden,) dtype
            factor of each column after RMSNorm
        wq : (heads, head_dim, hidden) dtype
            weights of q
        wk : (kv_heads, head_dim, hidden) dtype
            weights of k
        wv : (kv_heads, head_dim, hidden) dtype
            weights of v
        block_table : (batch, table_width) int32
            token t of sequence s is in page block_table[s, t // page_size], slot t % page_size
        kv_lens : (batch,) int32
            tokens of each sequence, new ones included
        cu_q : (batch + 1,) int32
            new tokens of sequence s are rows cu_q[s] : cu_q[s + 1]
        cos_sin : (positions, rotary_dim) float32
            of each position rotary_dim / 2 cosines, then as many sines
        bq : (heads, head_dim) dtype, optional
            bias of q
        bk : (kv_heads, head_dim) dtype, optional
            bias of k
        bv : (kv_heads, head_dim) dtype, optional
            bias of v
        k_scale : (1 or pages, kv_heads) float32, optional
            k_cache times k_scale are the keys
        v_scale : (1 or pages, kv_heads) float32, optional
            v_cache times v_scale are the values
        style : one of 'neox', 'interleaved', 'neox' by default
            elements that are a pair: i and i + rotary_dim / 2, or 2 i and 2 i + 1
        page_scales : bool, False by default
            whether each page has its own k_scale and v_scale
        eps : float, 1e-05 by default
            added to the mean square
        out : tuple of arrays (q_out, k_cache, v_cache)
            where results go; k_cache and v_cache must hold values, and is updated

        Returns
        -------
        q_out : (tokens, heads, head_dim) dtype
            rotated queries
        k_cache : (pages, page_size, kv_heads, head_dim or head_dim/2) kv_dtype
            slots of new tokens get rotated keys / k_scale
        v_cache : (pages, page_size, kv_heads, head_dim or head_dim/2) kv_dtype
            slots of new tokens get values / v_scale

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are head_dim: 64, 128, 256; page_size: 1, 16, 32, 64, 128; kv_dtype: bfloat16, float16,
            float8_e4m3fn; style: neox, interleaved; has_scales: False, True; page_scales: False, True;
            dtype: bfloat16, float16; bias: False, True.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.
        Not checked
            Values of cu_q, kv_lens, block_table, but under kernelcat.debug().

        The definition: reference/qkv_rope_write.py and kernelcat.reference('qkv_rope_write').
        """
    def bind(  # type: ignore[override]
        self,
        x: Array,
        norm_weight: Array,
        wq: Array,
        wk: Array,
        wv: Array,
        block_table: Array,
        kv_lens: Array,
        cu_q: Array,
        cos_sin: Array,
        bq: Array | None = ...,
        bk: Array | None = ...,
        bv: Array | None = ...,
        k_scale: Array | None = ...,
        v_scale: Array | None = ...,
        *,
        style: Literal['neox', 'interleaved'] = ...,
        page_scales: bool = ...,
        eps: float = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class RmsNorm(Op):
    def __call__(  # type: ignore[override]
        self,
        x: Array,
        weight: Array,
        global_scale: Array | None = ...,
        *,
        out_format: Literal['same', 'fp8', 'nvfp4'] = ...,
        eps: float = ...,
        out: tuple[Array | None, ...] | None = ...,
    ) -> tuple[Any, Any, Any, Any, Any, Any]:
        r"""rms_norm(x, weight, global_scale=None, out_format='same', eps=1e-05, out=None) -> y, q, scale,
            codes, block_scale, residual

        RMSNorm with an optional residual, to 16 bits, float8 or NVFP4.

        Parameters
        ----------
        x : (M, N) dtype
            rows to normalize
        weight : (N,) dtype
            factor of each column
        global_scale : (1,) float32, for out_format nvfp4
            NVFP4: factor of all values when they are read, 2^-64 to 2^64
        out_format : one of 'same', 'fp8', 'nvfp4', 'same' by default
            format of the result
        eps : float, 1e-05 by default
            added to the mean square, at least 1e-12
        out : tuple of arrays (y, q, scale, codes, block_scale, residual), optional
            where results go; allocated if left out

        Returns
        -------
        y : (M, N) dtype, for out_format same
            the result
        q : (M, N) float8_e4m3fn, for out_format fp8
            result / scale, rounded to nearest
        scale : (ceil(N/128), M) float32, for out_format fp8
            scale[j, m] = max |y[m, 128 j : 128 (j + 1)]| / 448, as fp8_gemm reads it
        codes : (M, N/2) float4_e2m1fn_x2, for out_format nvfp4
            E2M1 codes, two in a byte: the even column in the low half
        block_scale : (M, N/16) float8_e4m3fn, for out_format nvfp4
            factor of each 16 elements of a row
        residual : (M, N) dtype, optional
            h = x + residual takes its place

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: bfloat16, float16; residual: False, True; out_format: same, fp8, nvfp4.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/rms_norm.py and kernelcat.reference('rms_norm').
        """
    def bind(  # type: ignore[override]
        self,
        x: Array,
        weight: Array,
        global_scale: Array | None = ...,
        *,
        out_format: Literal['same', 'fp8', 'nvfp4'] = ...,
        eps: float = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class Sample(Op):
    def __call__(  # type: ignore[override]
        self,
        logits: Array,
        temperature: Array | None = ...,
        seed: Array | None = ...,
        offset: Array | None = ...,
        min_p: Array | None = ...,
        top_k: Array | None = ...,
        top_p: Array | None = ...,
        seen: Array | None = ...,
        penalty: Array | None = ...,
        *,
        has_logprobs: bool = ...,
        out: tuple[Array | None, ...] | None = ...,
    ) -> tuple[Any, Any]:
        r"""sample(logits, temperature=None, seed=None, offset=None, min_p=None, top_k=None, top_p=None,
            seen=None, penalty=None, has_logprobs=False, out=None) -> ids, logprobs

        A token for each row of logits: penalty, temperature, min_p, top_k, top_p and draw.

        Parameters
        ----------
        logits : (rows, vocab) dtype
            scores; -inf: never chosen
        temperature : (rows,) float32, optional
            0: the first token in order
        seed : (rows,) int64, optional
            key of the random numbers
        offset : (rows,) int64, optional
            counter: the position of the token
        min_p : (rows,) float32, optional
            least weight, largest is 1; 0: off
        top_k : (rows,) int32, optional
            tokens that stay; 0: off
        top_p : (rows,) float32, optional
            part of the weight that stays; 1: off
        seen : (rows, ceil(vocab/32)) int32, optional
            a bit for each token
        penalty : (rows,) float32, optional
            repetition penalty; 1: none
        has_logprobs : bool, False by default
            logprobs are computed
        out : tuple of arrays (ids, logprobs), optional
            where results go; allocated if left out

        Returns
        -------
        ids : (rows,) int32
            chosen tokens
        logprobs : (rows,) float32, optional
            natural log of the token's probability

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: float32, bfloat16, float16; has_temperature: False, True; has_filters: False,
            True; has_penalty: False, True; has_logprobs: False, True.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.
        Not checked
            Values of logits, temperature, min_p, top_k, top_p, penalty, but under kernelcat.debug().

        The definition: reference/sample.py and kernelcat.reference('sample').
        """
    def bind(  # type: ignore[override]
        self,
        logits: Array,
        temperature: Array | None = ...,
        seed: Array | None = ...,
        offset: Array | None = ...,
        min_p: Array | None = ...,
        top_k: Array | None = ...,
        top_p: Array | None = ...,
        seen: Array | None = ...,
        penalty: Array | None = ...,
        *,
        has_logprobs: bool = ...,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

class TmaCopy(Op):
    def __call__(  # type: ignore[override]
        self,
        src: Array,
        *,
        out: Array | None = ...,
    ) -> Any:
        r"""tma_copy(src, out=None) -> out

        Copy a matrix or a strided sub-tile at memory bandwidth.

        Parameters
        ----------
        src : (rows, cols) dtype, strides (src_stride, 1)
            matrix to copy
        out : array, optional
            where results go; allocated if left out

        Returns
        -------
        dst : (rows, cols) dtype, strides (dst_stride, 1)
            the copy

        Raises
        ------
        InvalidArgument
            A rank, shape, element type, stride, device or keyword is wrong, or arrays overlap. Legal
            are dtype: bfloat16, float16, float32, uint8.
        Unsupported
            No kernel serves this problem on this GPU.
        MissingDependency
            There is no GPU driver, or a needed compiler is not installed.

        The definition: reference/tma_copy.py and kernelcat.reference('tma_copy').
        """
    def bind(  # type: ignore[override]
        self,
        src: Array,
        *,
        out: Any = None, stream: Any = None,
    ) -> Bound: ...

@overload
def get(
    name: Literal["all_reduce"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> AllReduce: ...
@overload
def get(
    name: Literal["attn_merge"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> AttnMerge: ...
@overload
def get(
    name: Literal["embedding"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Embedding: ...
@overload
def get(
    name: Literal["flashmla"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Flashmla: ...
@overload
def get(
    name: Literal["fp8_gemm"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Fp8Gemm: ...
@overload
def get(
    name: Literal["fp8_quantize"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Fp8Quantize: ...
@overload
def get(
    name: Literal["fp8_swiglu"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Fp8Swiglu: ...
@overload
def get(
    name: Literal["gemm"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Gemm: ...
@overload
def get(
    name: Literal["kv_transfer"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> KvTransfer: ...
@overload
def get(
    name: Literal["kv_write"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> KvWrite: ...
@overload
def get(
    name: Literal["lm_head"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> LmHead: ...
@overload
def get(
    name: Literal["mla_kv_write"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> MlaKvWrite: ...
@overload
def get(
    name: Literal["moe_combine"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> MoeCombine: ...
@overload
def get(
    name: Literal["moe_dispatch"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> MoeDispatch: ...
@overload
def get(
    name: Literal["moe_gemm"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> MoeGemm: ...
@overload
def get(
    name: Literal["moe_mlp"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> MoeMlp: ...
@overload
def get(
    name: Literal["moe_route"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> MoeRoute: ...
@overload
def get(
    name: Literal["multicast_gemm"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> MulticastGemm: ...
@overload
def get(
    name: Literal["nvfp4_dequantize"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Nvfp4Dequantize: ...
@overload
def get(
    name: Literal["nvfp4_matmul"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Nvfp4Matmul: ...
@overload
def get(
    name: Literal["nvfp4_quantize"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Nvfp4Quantize: ...
@overload
def get(
    name: Literal["out_router"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> OutRouter: ...
@overload
def get(
    name: Literal["paged_attn"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> PagedAttn: ...
@overload
def get(
    name: Literal["qkv_rope_write"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> QkvRopeWrite: ...
@overload
def get(
    name: Literal["rms_norm"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> RmsNorm: ...
@overload
def get(
    name: Literal["sample"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Sample: ...
@overload
def get(
    name: Literal["tma_copy"],
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> TmaCopy: ...
@overload
def get(
    name: str,
    *, language: str | None = None, variant: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Op: ...
