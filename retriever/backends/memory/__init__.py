"""What a run remembers of its earlier searches."""
