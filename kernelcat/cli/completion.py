"""Completion on the Tab key: the names that options and arguments take, and their verb."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem, get_completion_class

from kernelcat import catalog
from kernelcat.catalog.implementation import LANGUAGES
from kernelcat.cli.options import as_json
from kernelcat.cli.output import emit, stream
from kernelcat.errors import KernelcatError
from kernelcat.runtime import gpu

SHELLS = {
    "bash": """echo 'eval "$(kernelcat completion bash)"' >> ~/.bashrc""",
    "zsh": """echo 'eval "$(kernelcat completion zsh)"' >> ~/.zshrc""",
    "fish": "kernelcat completion fish > ~/.config/fish/completions/kernelcat.fish",
}
"""Shell -> the line that installs completion for good."""

VARIABLE = "_KERNELCAT_COMPLETE"
"""Environment variable by which a shell asks for names; click reads it."""


class Names(click.types.StringParamType):
    """A text for which a shell is offered names; any other text is taken, too."""

    def __init__(self, names: Callable[[click.Context], Iterable[str]]) -> None:
        self._names = names

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        try:
            names = [name for name in self._names(ctx) if name.startswith(incomplete)]
        except KernelcatError:  # an entry that does not exist has no names
            names = []
        return [CompletionItem(name) for name in names]


def attach(command: click.Command) -> click.Command:
    """``command``, whose parameters that take a known kind of name offer such names."""
    for param in command.params:
        names = next((_NAMES[name] for name in param.opts if name in _NAMES), None)
        if names is not None and type(param.type) is click.types.StringParamType:
            param.type = Names(names)
    for child in getattr(command, "commands", {}).values():
        attach(child)
    return command


def _entries(ctx: click.Context) -> Iterable[str]:
    return catalog.names()


def _gpus(ctx: click.Context) -> Iterable[str]:
    return gpu.SKUS


def _problems(ctx: click.Context) -> Iterable[str]:
    return [name for entry in _given(ctx) for name in catalog.entry(entry).problems]


def _variants(ctx: click.Context) -> Iterable[str]:
    """Variants of the given entry in the given languages; by default in all that are installed."""
    given = ctx.params.get("language") or ctx.params.get("languages")
    languages = {given} if isinstance(given, str) else set(given or LANGUAGES)
    found = (i for entry in _given(ctx) for i in catalog.implementations(entry))
    return sorted({i.variant for i in found if i.language in languages})


def _given(ctx: click.Context) -> tuple[str, ...]:
    """The entries that stand before the word to complete; all where there is none.

    Where the value of an option is asked for, click leaves arguments in ``ctx.args``.
    """
    given = ctx.params.get("entry") or ctx.params.get("entries") or ctx.args
    words = (given,) if isinstance(given, str) else tuple(given)
    return words or catalog.names()


_NAMES: dict[str, Callable[[click.Context], Iterable[str]]] = {
    "entry": _entries,
    "entries": _entries,
    "--gpu": _gpus,
    "--problem": _problems,
    "--variant": _variants,
    "--language": lambda ctx: LANGUAGES,
}
"""Argument or option -> the names that it takes."""


@click.command()
@click.argument("shell", type=click.Choice(tuple(SHELLS)))
@as_json
def completion(shell: str, as_json: bool) -> None:
    """Print the script that makes SHELL complete verbs, entries, GPUs, problems and variants.

    \b
    Example:
      kernelcat completion bash

    \b
    Install it once:
      bash:  echo 'eval "$(kernelcat completion bash)"' >> ~/.bashrc
      zsh:   echo 'eval "$(kernelcat completion zsh)"' >> ~/.zshrc
      fish:  kernelcat completion fish > ~/.config/fish/completions/kernelcat.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(click.Command("kernelcat"), {}, "kernelcat", VARIABLE).source()
    if as_json:
        return emit({"shell": shell, "script": script, "install": SHELLS[shell]})
    stream(f"{script}\n")
