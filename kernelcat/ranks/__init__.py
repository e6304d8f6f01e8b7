"""Entries of several ranks: processes that compute together, one GPU or a share of one for each.

A :class:`~kernelcat.ranks.group.Group` is what a rank sees of the others: their windows, mapped
into its address space, and a rendezvous for what the hosts agree on. ``check`` judges
implementations on all ranks, ``sanitize`` does so under compute-sanitizer (on arrays that
``mirrored`` keeps on the host), ``race`` races them with NCCL and torch's symmetric memory, and
``tune`` stores what was raced.
"""
