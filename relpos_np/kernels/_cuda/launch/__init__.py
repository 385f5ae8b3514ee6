"""The device: how kernels are compiled and launched, the records they read, and memory that calls share."""
