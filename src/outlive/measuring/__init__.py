"""How fast a loader is, with how many workers, and where the time goes: `outlive bench`."""
