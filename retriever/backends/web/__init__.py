"""Online search engines as back-ends of the service: one file a provider, limits, recordings, and guarded pages."""
