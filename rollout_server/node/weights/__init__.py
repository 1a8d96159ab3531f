"""Weight updates of an engine: files, broadcast, adapters."""
