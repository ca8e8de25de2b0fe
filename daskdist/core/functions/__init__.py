"""Functions of users: what they refer to, their fingerprints, and how they are called."""
