"""Agent programs as files: built once, kept in a store, unpacked once on each node."""
