"""The results as a site: pages with plots and tables that need no server and no network."""

from kernelcat.report.site.build import pages, write
from kernelcat.report.site.results import Results

__all__ = ["Results", "pages", "write"]
