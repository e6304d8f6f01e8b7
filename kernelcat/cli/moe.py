"""Verbs about models and the engine that serves them: moe."""

from __future__ import annotations

import click

from kernelcat.cli.group import Group
from kernelcat.cli.moe_bench import bench
from kernelcat.cli.moe_generate import generate
from kernelcat.cli.moe_ladder import ladder
from kernelcat.cli.moe_results import results
from kernelcat.cli.moe_serving import serve


@click.group(cls=Group)
def moe() -> None:
    """Run mixture-of-experts models from the catalog's kernels.

    \b
    Example:
      kernelcat moe generate smollm2 "Why is the sky blue?"
      kernelcat moe serve gpt-oss-20b --port 8000
    """


moe.add_command(generate)
moe.add_command(serve)
moe.add_command(bench)
moe.add_command(ladder)
moe.add_command(results)
