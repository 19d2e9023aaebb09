"""Where workers run on systems without fork and memfd: spawned one by one, with one of them in reserve."""
