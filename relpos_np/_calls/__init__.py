"""From a checked call to a backend: lowering, the memory it will take, arrays on a device."""
