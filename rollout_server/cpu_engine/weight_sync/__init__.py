"""Weight updates by broadcast for the CPU engine."""
