"""The index of techniques: which of them the catalog uses, and how we know.

``groups/`` holds one file for each topic, with records that people write: names, explanations, and
what proves each. Everything else here verifies and shows the records. Numbers are never written by
people.
"""
