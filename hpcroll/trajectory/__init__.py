"""From model calls to token sequences, and the invariants that hold for them."""
