"""Text and HTML of plans and values."""
