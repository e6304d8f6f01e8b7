"""A model on several ranks of one host: processes with a GPU or a share of one each.

An :class:`~kernelcat.moe.parallel.exchange.Exchange` is what a rank sees of the others. Kernels of
the catalog exchange tensors between GPUs (`device_exchange`); oracles do it between processes
without one (`host_exchange`), which is the definition, and what tests run.
"""
