"""What the transport promises, through real loaders and real workers."""
