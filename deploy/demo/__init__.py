"""The demo: a generated world, a tiny model and its warm start, and the run that teaches it to search."""
