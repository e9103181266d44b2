"""Agent programs."""
