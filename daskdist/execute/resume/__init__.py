"""Positions in streams: their content, and how streams are advanced to them."""
