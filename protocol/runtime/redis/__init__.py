"""Redis clients of all processes: URLs, connections, one error taxonomy."""
