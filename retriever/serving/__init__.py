"""From a request's queries to batches of a back-end: cache, admission, dynamic batching."""
