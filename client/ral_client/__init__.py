"""What the user types: finds or starts the broker, asks, and stands by a running program."""
