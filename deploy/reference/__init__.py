"""Pages that are generated from the code: settings, metrics, presets beside their sources."""
