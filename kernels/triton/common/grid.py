"""Grids of programs: what a launch can have."""

MAX_GRID_Y = 65535
"""Programs on the second and on the third axis of a grid, at most."""
