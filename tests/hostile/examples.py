"""What programs of these tests load."""

numbers = list(range(8))
