"""Streams of elements: read ahead within bounds, and handed on in order."""
