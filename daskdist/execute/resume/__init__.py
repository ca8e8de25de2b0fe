"""Positions in streams: what they consist of, and how streams are advanced to them."""
