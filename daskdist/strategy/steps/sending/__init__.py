"""The sending of calls: their arguments."""
