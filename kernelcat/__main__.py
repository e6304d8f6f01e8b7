"""``python -m kernelcat``."""

from kernelcat.cli import main

main()
