"""Dead letters of a run: what they were, what became of their seqs, and which may be requeued."""
