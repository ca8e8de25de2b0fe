"""Callers: each way to make the calls that an interpreter asks for."""
