"""Data moved once into shared memory and read from there by every worker. Private: `outlive.share` is the function."""
