"""Data moved once into shared memory and read from there by every worker. Private: `holdfast.share` is the function."""
