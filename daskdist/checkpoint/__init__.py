"""State files: what objects have, by name, in a file that is whole or is not there."""
