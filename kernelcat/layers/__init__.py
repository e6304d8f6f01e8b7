"""What surrounds kernels in a model: latent attention, 4-bit weights, checkpoints.

Functions here prepare the arguments of entries, and have no kernel of their own.
"""
