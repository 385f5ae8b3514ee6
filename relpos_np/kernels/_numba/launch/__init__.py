"""How kernels are compiled, kept on disk and run on threads, and the records that they read."""
