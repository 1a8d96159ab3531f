"""Per-run memory of earlier searches."""
