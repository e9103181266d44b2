"""The node-local model endpoint that records tokens."""
