"""Rootless sandboxes, and the images they start from."""
