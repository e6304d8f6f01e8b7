"""A model whose experts are divided among ranks."""

from __future__ import annotations

from kernelcat.errors import InvalidArgument
from kernelcat.moe.grouped_experts import GroupedExperts
from kernelcat.moe.model import Decoder
from kernelcat.moe.ops import bind
from kernelcat.moe.parallel.beside import Beside
from kernelcat.moe.parallel.exchange import Exchange
from kernelcat.moe.parallel.expert_layer import DividedExperts
from kernelcat.moe.parallel.expert_load import ExpertLoad
from kernelcat.moe.parallel.expert_product import PartialProduct
from kernelcat.moe.weights import ExpertShare


def divide(model: Decoder, exchange: Exchange, can_move: bool = False) -> ExpertLoad:
    """Lets ``model``, which holds the experts of its rank's share, find the others by ``exchange``.

    Parameters
    ----------
    can_move : whether experts may change places, which costs each layer one look-up

    Returns
    -------
    The counts of what experts serve.

    Raises
    ------
    InvalidArgument
        The model has no experts, or a rank would hold fewer than serve a token: `moe_gemm` takes as
        many slots of a token as there are experts, at most.
    """
    counts = [len(layer.experts["w1"]) for layer in model.layers if getattr(layer, "experts", None)]
    if not counts:
        raise InvalidArgument(f"{model.config.architecture} has no experts to divide among ranks")
    top_k = model.config.num_experts_per_tok
    if min(counts) < top_k:
        raise InvalidArgument(
            f"{exchange.ranks} ranks would hold {min(counts)} experts each, and {top_k} serve a "
            "token: take fewer ranks"
        )
    product = bind("moe_gemm", model.device)
    if model.device.type == "cuda":
        product = PartialProduct(product, exchange.ranks)
    grouped = GroupedExperts(bind("moe_route", model.device), product)
    load = ExpertLoad(model, ExpertShare(exchange.rank, exchange.ranks), can_move)
    model.divided = DividedExperts(exchange, grouped, Beside(model.device), load.counts)
    return load
