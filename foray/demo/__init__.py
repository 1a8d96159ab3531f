"""The demo: a generated world, a tiny model with a warm start, and the run that trains it to search."""
