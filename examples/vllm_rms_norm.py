"""vLLM's RMSNorm by the catalog, as an out-of-tree operator. Shown and tested without vLLM.

vLLM takes the class that is registered under an operator's name in place of its own
(https://docs.vllm.ai, "CustomOp"). Make a package of this file, let its pyproject.toml say

    [project.entry-points."vllm.general_plugins"]
    kernelcat = "vllm_rms_norm:register"

and start vLLM with the operator enabled:

    vllm serve MODEL --compilation-config '{"custom_ops": ["+rms_norm"]}'

Operators are forward only, which is all that a server needs.
"""

import torch

import kernelcat


def register():
    """What vLLM calls in each of its processes, before it makes a model."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.layernorm import RMSNorm

    normalize = kernelcat.get("rms_norm")

    @CustomOp.register_oot(name="RMSNorm")
    class CatalogRMSNorm(RMSNorm):
        def forward_cuda(self, x, residual=None):
            """x (..., hidden), normalized; with ``residual``, which x is added to, both of them."""
            if self.variance_size_override is not None or x.dtype == torch.float32:
                return super().forward_cuda(x, residual)
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            y = torch.empty_like(rows)
            sums = None if residual is None else residual.view_as(rows)
            normalize(
                rows, self.weight.data, eps=self.variance_epsilon,
                out=(y, None, None, None, None, sums),
            )  # fmt: skip
            return y.view_as(x) if residual is None else (y.view_as(x), residual)

    return CatalogRMSNorm
