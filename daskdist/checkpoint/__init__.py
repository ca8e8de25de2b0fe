"""Checkpoints: the states of objects by name, in files that are written completely or not at all."""
