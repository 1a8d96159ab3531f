"""Engines: the interface, the HTTP client, routing, failover, admission control."""
