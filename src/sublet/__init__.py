"""Sublet: lend idle quota, take it back in seconds, lose nothing."""

__version__ = "0.1.0"
