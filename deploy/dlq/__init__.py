"""Dead letters of a run: read, show, requeue and purge them."""
