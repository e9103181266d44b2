"""Task files: reading, checking and building them."""
