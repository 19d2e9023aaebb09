"""Why did it die: from evidence to a verdict, and from there to people."""
