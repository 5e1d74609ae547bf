"""The HTML report of a run: one self-contained file."""

from tailrace_cli.report.html import render, write_report

__all__ = ["render", "write_report"]
