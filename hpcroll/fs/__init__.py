"""The shared file system: names, atomic writes, probes and node-local locks."""

from hpcroll.fs.paths import RunPaths

__all__ = ["RunPaths"]
