"""HTTP servers of all services: access rules, binding, OpenAPI."""
