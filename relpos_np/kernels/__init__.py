"""Backends: each turns terms into attention and knows nothing of schemes."""
