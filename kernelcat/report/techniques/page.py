"""``docs/techniques.md``, which ``make readme`` writes."""

from __future__ import annotations

from kernelcat.report.techniques.code import entry_page
from kernelcat.report.techniques.index import GROUPS, every
from kernelcat.report.techniques.technique import STATES, Group, Technique, tally

MADE = (
    "<!-- Made by make readme from kernelcat/report/techniques/groups: change these files, "
    "not this one. -->"
)

_INTRODUCTION = """\
Techniques of GPU performance work, from memory to serving: where the catalog uses each of them, and
how we know. `kernelcat techniques` prints this list, `kernelcat techniques "TMA multicast"` one of
them.

- *measured*: rows of `tuning_db/nvidia-h200.jsonl` show the effect. A ratio is the time of the
  second over that of the first, from one run; above 1 the first is faster. Two variants may differ
  in more than one technique, and the ratio compares them as wholes. Losses and ties stand here too.
  Of each variant the tuner keeps the best configuration, and a count says how often that one had
  the technique. Near the roof of memory or tensor cores a kernel must use what leads there.
- *in machine code*: the instruction is in the code of a kernel that ran on a GPU, or the attribute
  in its launch. `kernelcat inspect` finds instructions in code that is compiled anew, and the
  records in `tuning_db/machine_code` say which code ran.
- *tested*: a test fails where the technique is lost.
- *compiled only*: in machine code of which no committed record says that it ran.
- *not yet*, and *does not apply*: with the reason.

Only the first three count as covered: {covered} of {total}."""


_PLACES = 4
"""Implementations that a line names; of more it gives the number."""


def markdown() -> str:
    """The page as Markdown.

    Raises
    ------
    MissingDependency
        A language is not installed.
    """
    techniques = every()
    covered = sum(each.is_covered for each in techniques)
    introduction = _INTRODUCTION.format(covered=covered, total=len(techniques))
    sections = [_section(group) for group in GROUPS]
    return "\n\n".join(("# Techniques", MADE, introduction, _overview(), *sections)) + "\n"


def _overview() -> str:
    lines = [
        f"| group | {' | '.join(STATES)} |",
        f"| --- |{' ---: |' * len(STATES)}",
    ]
    for group in GROUPS:
        counts = (str(n or "") for n in tally(group.techniques).values())
        lines.append(f"| [{group.name}](#{group.slug}) | {' | '.join(counts)} |")
    return "\n".join(lines)


def _section(group: Group) -> str:
    names = ", ".join(f"[{_title(each)}](#{each.slug})" for each in group.techniques)
    return "\n\n".join((f"## {group.name}", names, *map(_technique, group.techniques)))


def _technique(technique: Technique) -> str:
    also = f" Also: {', '.join(technique.aliases)}." if technique.aliases else ""
    lines = [f"- {each.text(link)}" for each in technique.evidence]
    for title, text in (
        ("not yet", technique.not_yet),
        ("does not apply", technique.does_not_apply),
        ("where", _where(technique)),
    ):
        lines += [f"- {title}: {text}"] if text else []
    return "\n\n".join(
        (
            f"### {_title(technique)}",
            f"*{technique.state}.* {technique.explanation}{also}",
            "\n".join(lines),
            f"Source: {technique.source}.",
        )
    )


def _title(technique: Technique) -> str:
    """The name; its underscores do not make it bold."""
    return technique.name.replace("_", "\\_")


def _where(technique: Technique) -> str:
    """Links to pages of implementations and to files."""
    places = [link(f"`{name}`", entry_page(name)) for name in technique.implementations]
    more = len(places) - _PLACES
    files = [link(f"`{path}`", path) for path in technique.modules]
    counted = [f"{more} more"] if more > 0 else []
    return ", ".join((*places[:_PLACES], *counted, *files))


def link(label: str, path: str) -> str:
    """A link of the page to a path that is relative to the root of the repository."""
    target = path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"
    return f"[{label}]({target})"
