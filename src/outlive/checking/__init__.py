"""Every sample of a dataset fetched once, before a long run does it: `outlive check`."""
