"""Weight updates of the embedded engine by broadcast."""
