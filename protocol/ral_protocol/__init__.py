"""What the two sides of ral's socket have in common: bytes, messages, exit statuses. Runs nowhere by
itself."""
