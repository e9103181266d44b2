"""What agents speak: one module per model API. Adding one edits no other."""
