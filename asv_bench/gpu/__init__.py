"""What is measured and checked on a GPU: ``tests/gpu/run_all.sh FOLDER`` runs all of it; records lie beside this file.

Nothing here is imported by the library, and Numba and torch only by what runs in a process of its own.
"""
