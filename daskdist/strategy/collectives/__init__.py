"""Collectives: what replicas do together, in a process and across workers."""
