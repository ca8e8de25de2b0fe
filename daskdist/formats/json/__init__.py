"""JSON and lines of JSON."""
