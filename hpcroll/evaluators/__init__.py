"""Verifiers: from what an agent left to a reward."""
