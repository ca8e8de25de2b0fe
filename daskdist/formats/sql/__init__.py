"""Databases, read by SQLAlchemy."""
