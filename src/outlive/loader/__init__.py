"""The data loader."""
