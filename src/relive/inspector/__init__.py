"""Reports on the data that an agent learns from: figures, warnings and a page for any buffer, checkpoint or dataset."""

from relive.inspector.report import Report, inspect

__all__ = ["Report", "inspect"]
