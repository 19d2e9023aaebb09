"""Real deaths and hangs, and what the autopsy says about them."""
