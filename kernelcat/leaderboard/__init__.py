"""The leaderboard: queries over measurements, shown as a table, JSON, HTML or Markdown."""

from kernelcat.leaderboard.board import Means, Row, board, load, means
from kernelcat.leaderboard.ladder import Ladder, Step, ladders
from kernelcat.leaderboard.ladder import sheet as ladder_sheet
from kernelcat.leaderboard.page import to_html
from kernelcat.leaderboard.readme import render_readme, update_readme
from kernelcat.leaderboard.render import table, to_json, to_markdown
from kernelcat.leaderboard.traffic import sheet as traffic_sheet

__all__ = [
    "Ladder",
    "Means",
    "Row",
    "Step",
    "board",
    "ladder_sheet",
    "ladders",
    "load",
    "means",
    "render_readme",
    "table",
    "to_html",
    "to_json",
    "to_markdown",
    "traffic_sheet",
    "update_readme",
]
