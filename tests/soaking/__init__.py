"""What `tests/soak.py` is made of: calls drawn from a seed and a number, how each is judged, and memory."""
