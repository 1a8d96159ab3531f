"""Engines: the seam, the HTTP client, the router, the scripted fake."""
