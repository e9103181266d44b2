"""The Python API: what a user writes."""
