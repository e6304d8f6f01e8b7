"""A call of an operator: arguments to a problem, a problem to a configuration, and the launch.

Here belongs what stands between ``kernelcat.get`` and the launcher: what arrays are, the choice of
an implementation, the fast path of a known signature, and torch's custom operators.
"""
