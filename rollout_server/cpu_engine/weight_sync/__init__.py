"""Weight updates by broadcast for the embedded engine."""
