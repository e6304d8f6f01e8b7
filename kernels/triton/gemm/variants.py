"""How implementations of products are made, in Triton and Gluon."""

from typing import Any

from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.triton.common.estimate import estimate
from kernelcat.runtime.gpu import Gpu


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
