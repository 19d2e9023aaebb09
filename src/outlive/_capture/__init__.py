"""What survives a worker: its black box and the stacks of its last moment."""
