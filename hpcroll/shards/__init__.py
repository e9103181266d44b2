"""Trajectory shards: written by workers, read by trainers."""
