"""Results in the formats of other projects.

A module belongs here if it writes files that another project reads.
"""
