"""Formats of other systems, in and out: one folder each with the same file names."""
