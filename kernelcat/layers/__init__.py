"""What surrounds kernels in a model: latent attention, 4-bit weights, checkpoints.

Here belongs what prepares arguments of entries and has no kernel of its own.
"""
