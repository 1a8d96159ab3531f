"""Search: the seam, the client of the retriever, the fake."""
