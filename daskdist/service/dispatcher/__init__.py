"""The dispatcher of the data service: its state machine, and its place on the scheduler."""
