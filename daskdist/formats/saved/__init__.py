"""Saved datasets: Arrow files and a manifest."""
