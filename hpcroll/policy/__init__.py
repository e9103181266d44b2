"""The policy registry: versions that the trainer publishes, endpoints that serve them."""
