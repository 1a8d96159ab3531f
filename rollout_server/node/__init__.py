"""The agent beside one engine: launches it, keeps it registered, and loads every new policy version into it."""
