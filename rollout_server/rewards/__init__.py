"""Rewards: one file each, chosen by the config union."""
