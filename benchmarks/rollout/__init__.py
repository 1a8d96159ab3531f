"""The rollout benchmark: the rollout server over scripted engines against a turn barrier."""
