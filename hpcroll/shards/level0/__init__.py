"""Level 0: the open shards that workers append to, and a reader's way through one."""
