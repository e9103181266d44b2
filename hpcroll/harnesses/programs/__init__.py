"""Agent programs that run as black boxes, one module each."""
