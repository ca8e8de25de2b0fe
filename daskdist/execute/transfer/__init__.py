"""Copies from the host to devices, ahead of use."""
