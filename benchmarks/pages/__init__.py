"""Pages generated from the code: settings, metrics, presets with their sources."""
