"""What inference servers speak: how each is asked, and how its replies are read."""
