"""Users' functions: their references, their fingerprints, and calls of them."""
