"""One worker: stage pools, deadlines, drain and commit."""
