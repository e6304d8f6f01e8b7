"""Parts of SVG pictures: a page with a title, and text; light, with a background of its own."""

from __future__ import annotations

from html import escape

INK, DIM, GRID, PAPER = "#1b1f24", "#57606a", "#d8dee4", "#ffffff"


def page(width: int, height: int, title: str, subtitle: str, description: str, body: str) -> str:
    """A picture of ``width`` x ``height`` pixels; ``description`` is for those who see no picture.

    ``body`` are elements, drawn below the two lines of text at the top.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' font-family="system-ui, sans-serif" font-size="13">\n<title>{escape(title)}</title>\n'
        f"<desc>{escape(description)}</desc>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}" stroke="{GRID}"/>\n'
        f"{text(20, 30, title, size=17, weight='600')}\n"
        f"{text(20, 52, subtitle, DIM)}\n"
        f"{body}\n</svg>\n"
    )


def text(
    x: float,
    y: float,
    words: str,
    color: str = INK,
    anchor: str = "start",
    weight: str = "400",
    size: int = 13,
) -> str:
    """``words``, escaped, at the pixels x and y of their base line."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}" '
        f'font-weight="{weight}" font-size="{size}">{escape(words)}</text>'
    )
