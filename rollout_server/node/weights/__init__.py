"""How a node brings new weights into its engine: files, broadcast, adapters."""
