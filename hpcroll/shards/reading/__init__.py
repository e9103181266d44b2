"""The trainer's reader: one stream over a run, in groups, steps and batches."""
