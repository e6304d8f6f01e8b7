"""The results as a static site: pages with plots and tables that need no server and no network."""

from kernelcat.report.site.build import write

__all__ = ["write"]
