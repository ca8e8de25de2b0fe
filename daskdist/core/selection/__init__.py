"""Selections: which rows of which blocks make up chunks, in what order."""
