"""What bytes mean: records, marks and where they lie, without any file."""
