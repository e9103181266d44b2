"""Launchers: start workers, tell their state, stop them."""
