"""The operating system, thinly: sockets with descriptors, shared memory, processes."""
