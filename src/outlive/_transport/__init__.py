"""How a batch travels from a worker to the trainer."""
