"""The workers of the data service: the production of elements and their delivery to consumers."""
