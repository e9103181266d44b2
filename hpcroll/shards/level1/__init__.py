"""Level 1: packed shards, sorted by group."""
