"""Proof that kernels are right: the gate, fuzzing, the sanitizer, machine code and receipts.

A module belongs here if it judges a kernel (is the result right, does the machine code hold the
promised instructions, how many bytes move) or keeps such a judgement: receipts, profiles, and
records of the machine code that ran.
"""
