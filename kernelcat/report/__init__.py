"""What people read: the leaderboard, ladders, cards of entries, explanations, what is missing.

Here belongs every query over results, and how it is shown: as a table, JSON, HTML or Markdown.
"""
