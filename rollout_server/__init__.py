"""The asyncio service that turns questions into trajectory groups."""
