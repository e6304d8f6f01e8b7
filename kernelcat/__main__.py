"""The command line as ``python -m kernelcat``."""

from kernelcat.cli import main

main()
