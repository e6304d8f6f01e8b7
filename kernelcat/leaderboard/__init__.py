"""The leaderboard: queries over measurements, shown as a table, JSON, HTML or Markdown."""

from kernelcat.leaderboard.board import Means, Row, board, load, means
from kernelcat.leaderboard.page import to_html
from kernelcat.leaderboard.render import render_readme, table, to_json, to_markdown, update_readme

__all__ = [
    "Means",
    "Row",
    "board",
    "load",
    "means",
    "render_readme",
    "table",
    "to_html",
    "to_json",
    "to_markdown",
    "update_readme",
]
