"""The fatal-signal recorder, in processes that really die."""
