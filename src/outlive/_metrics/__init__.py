"""What a job publishes of itself, and how others read it."""
