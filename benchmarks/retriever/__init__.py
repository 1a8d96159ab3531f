"""The retriever benchmark: the search service against bare FAISS."""
