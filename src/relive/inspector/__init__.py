"""See what an agent learns from: any buffer, checkpoint or dataset as numbers, warnings in words, and a page."""

from relive.inspector.report import Report, inspect

__all__ = ["Report", "inspect"]
