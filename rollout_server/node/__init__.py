"""The agent beside one engine: launches it, registers it, beats for it, and loads every new policy version into it."""
