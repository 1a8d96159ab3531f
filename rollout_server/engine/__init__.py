"""Engines: the interface, the HTTP client, routing and failover, admission control."""
