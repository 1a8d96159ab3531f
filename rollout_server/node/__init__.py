"""The node: launches an engine, keeps it registered, and loads every new policy version into it."""
