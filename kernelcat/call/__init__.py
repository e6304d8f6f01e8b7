"""Calls of operators: from arguments to a problem, from a problem to a configuration, and a launch.

This subpackage holds everything between ``kernelcat.get`` and the launcher: arrays of all
libraries, the choice of an implementation, the fast path of a known signature, and torch's custom
operators.
"""
