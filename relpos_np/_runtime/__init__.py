"""What the whole process shares: threads, the limit of memory, forks."""
