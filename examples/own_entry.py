"""A kernel of one's own package as an entry: called, checked and tuned like the catalog's.

    python examples/own_entry.py

The package is the folder ``own_package``: a specification, a kernel in Triton, and one line that
adds both to the catalog. The command line takes the folder from a variable:

    KERNELCAT_ENTRIES=examples/own_package kernelcat check squared_relu
    KERNELCAT_ENTRIES=examples/own_package kernelcat tune squared_relu
"""

import own_package  # noqa: F401  (adds squared_relu)
import torch

import kernelcat


def main():
    square = kernelcat.get("squared_relu")
    x = torch.randn(64, 1000, dtype=torch.bfloat16)
    largest = (square(x).float() - torch.relu(x.float()).square()).abs().max().item()
    print(f"largest difference from torch {largest:.4f}")


if __name__ == "__main__":
    torch.set_default_device("cuda")
    main()
