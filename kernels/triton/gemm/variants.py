"""How implementations of products are made, in Triton and Gluon."""

from typing import Any

from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.triton.gemm.estimate import estimate
from kernelcat.runtime.gpu import Gpu

HOPPER, BLACKWELL = ("sm_90a",), ("sm_100a", "sm_103a")


def implementation(entry: str = "gemm", **fields: Any) -> Implementation:
    """A Triton implementation whose default is the best by the model, with the most stages."""

    def default(problem: Problem, gpu: Gpu) -> Config:
        def cost(config: Config) -> tuple[float, int]:
            return made.estimate(problem, config, gpu), -config.get("stages", 0)

        first = Config({name: values[0] for name, values in made.space.items()})
        return min(made.configs(problem, gpu), key=cost, default=first)

    made = Implementation(
        entry=entry, language="triton", default=default, **{"estimate": estimate, **fields}
    )
    return made


def on_blackwell(hopper: Implementation, sass: str) -> Implementation:
    """The same source for Blackwell, where Triton makes tcgen05 products (``sass``) of it."""
    same = ("entry", "summary", "space", "illegal", "program", "estimate", "rank")
    techniques = {name: proof for name, proof in hopper.techniques.items() if name != "wgmma"}
    return implementation(
        variant=f"{hopper.variant}_blackwell",
        archs=BLACKWELL,
        techniques=techniques | {"tcgen05": sass},
        unverified="needs a Blackwell GPU",
        **{name: getattr(hopper, name) for name in same},
    )


def reject_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_n = int(config["tile"].split("x")[1])
    if problem["N"] > 65535 * block_n:
        return "N needs more than 65535 tiles, the most a grid's second axis has"
    return None
