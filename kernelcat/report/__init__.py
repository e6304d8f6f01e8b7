"""What people read: the leaderboard, ladders, cards of entries, explanations, missing software.

A module belongs here if it summarizes results or the catalog, or shows the summary as a table,
JSON, HTML or Markdown.
"""
