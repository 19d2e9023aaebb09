"""How a batch is packed into shared memory and read back, in one process."""
