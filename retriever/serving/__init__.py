"""Process queries in batches of a backend: cache, admission, dynamic batching."""
