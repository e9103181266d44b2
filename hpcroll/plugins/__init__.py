"""Plug-ins: a name or a dotted path in the config picks an implementation."""

from hpcroll.plugins.registry import Family, known, load

__all__ = ["Family", "known", "load"]
