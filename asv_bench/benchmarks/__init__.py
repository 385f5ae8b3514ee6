"""Benchmarks of relpos_np for airspeed velocity."""
