"""Registers of a thread."""

import cutlass.cute as cute


def flat(fragment):
    """A compact fragment as one vector."""
    return cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))
