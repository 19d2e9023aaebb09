"""Equality with torch's own loader: the same batches, errors and warnings, bit for bit."""
