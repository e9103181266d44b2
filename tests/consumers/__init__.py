"""Scripts that read exports with the real consumers; they run in the consumers' own environments."""
