"""Session configuration: files, layers, and the effective value of every setting."""
