"""Collective operations of replicas, within a process and across workers."""
