"""The asyncio service that rolls out trajectory groups for questions."""
