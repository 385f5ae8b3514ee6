"""A checked call of attention, what positions contribute to it as terms, and the checks of what users pass."""
