"""From a call to a kernel's record: what it names, how the work is divided, how many bytes it takes."""
