"""Streams of elements: they are read ahead within limits, and handed out in order."""
