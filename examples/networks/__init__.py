"""Whole published networks in NumPy, built on relpos_np.layers."""
