"""The files that ``make readme`` writes: README's tables, and pages and a picture in ``docs/``.

- ``docs/board.svg`` and ``docs/entries/ENTRY.md`` are made as a whole.
- ``docs/entries/README.md`` has the list of entries between ``<!-- entries -->`` and
  ``<!-- /entries -->``, and the support matrix.
- ``docs/techniques.md`` is made as a whole.
- ``docs/predictions.md`` is made as a whole.
- ``docs/results/ENTRY.md`` has a block ``results:ENTRY`` below what people wrote; a page that is
  missing begins with a title.
- ``docs/results/engine.md`` has tables of the engine, and is made as a whole.
- ``docs/results/README.md`` lists these pages, and is made as a whole.
"""

from __future__ import annotations

import re
from pathlib import Path

from kernelcat import catalog
from kernelcat.report import engine_page, entry_page, picture, predictions, support
from kernelcat.report.readme import render_readme, update_readme
from kernelcat.report.techniques import page as techniques
from kernelcat.store import model_results, shipped

GPU = "h200"
"""The SKU of the picture and of the page of predictions."""

_HOW = "how-results-are-made.md"
_ENTRIES = re.compile(r"(?P<open><!-- entries -->)\n.*?(?P<close><!-- /entries -->)", re.DOTALL)


def documents(docs: Path) -> dict[Path, str]:
    """Path -> text of every file that is made in the folder ``docs``.

    Raises
    ------
    MissingDependency
        A language is not installed.
    """
    rows = shipped()
    texts = {
        docs / "board.svg": picture.to_svg(rows, GPU),
        docs / "techniques.md": techniques.markdown(),
        docs / "predictions.md": predictions.markdown((GPU,), rows),
    }
    for name in catalog.names():
        texts[docs / "entries" / f"{name}.md"] = entry_page.markdown(name)
    for name in catalog.complete():
        path = docs / "results" / f"{name}.md"
        text = path.read_text(encoding="utf-8") if path.exists() else _new_results(name)
        texts[path] = render_readme(text, rows)
    engines = model_results.read(model_results.shipped_folder())
    texts[docs / "results" / engine_page.FILE] = engine_page.markdown(engines)
    texts[docs / "results" / "README.md"] = _index_of_results()
    path = docs / "entries" / "README.md"
    texts[path] = _fill_entries(support.fill(path.read_text(encoding="utf-8")))
    return texts


def update(readme: Path) -> None:
    """Write the tables of ``readme``, and the documents in ``docs/`` beside it if there is such.

    Raises
    ------
    InvalidArgument
        ``readme`` has no block, or a marker has too few or too many words.
    MissingDependency
        A language is not installed.
    """
    update_readme(readme)
    readme.write_text(support.fill(readme.read_text(encoding="utf-8")), encoding="utf-8")
    docs = readme.parent / "docs"
    if (docs / "entries" / "README.md").exists():
        for path, text in documents(docs).items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")


def _index_of_results() -> str:
    """What the pages of results have, and a line for each page."""
    lines = (
        f"- [`{name}`]({name}.md): {catalog.entry(name).summary}" for name in catalog.complete()
    )
    return (
        "# Results\n\nA page for each entry, made of `tuning_db/` by `make readme`: the winner of "
        "every problem beside its peers, the ladder of variants, and the bytes that the hardware "
        "counted. "
        f"[How results are made](../{_HOW}) says what a number means. [The engine]"
        f"({engine_page.FILE}) has a page of its own.\n\n" + "\n".join(lines) + "\n"
    )


def _new_results(name: str) -> str:
    links = f"[The entry](../entries/{name}.md) · [how these numbers are made](../{_HOW})"
    return f"# Results of {name}\n\n{links}\n\n<!-- results:{name} -->\n<!-- /results -->\n"


def _fill_entries(text: str) -> str:
    return _ENTRIES.sub(lambda m: f"{m['open']}\n{entry_page.index()}{m['close']}", text)
