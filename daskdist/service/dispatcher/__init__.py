"""The dispatcher of the data service: its state machine, and the plugin that runs it on the scheduler."""
