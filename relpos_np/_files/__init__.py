"""Readers of files that may hold anything."""
