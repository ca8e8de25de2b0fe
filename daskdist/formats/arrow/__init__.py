"""Arrow IPC and Feather files."""
