"""The rollout benchmark: the rollout server with scripted engines against other routing and a turn barrier."""
