"""What the doctor finds, each provoked for real; and what it must not find."""
