"""The consumers of the data service: connections to the dispatcher and to workers."""
