"""Real deaths, hangs and errors; what the verdict on each says, and how people see it."""
