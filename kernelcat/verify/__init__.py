"""Proof that kernels are right: the gate, fuzzing, the sanitizer, machine code and receipts.

Here belongs what judges a kernel, and what keeps the judgement: receipts, profiles, and records of
the machine code that ran.
"""
