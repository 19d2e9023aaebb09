"""Real deaths, hangs and errors, and what the verdict on each says."""
