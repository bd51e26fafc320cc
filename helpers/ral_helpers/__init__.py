"""Holds the native programs: trampoline, pid 1 of a sandbox, and holder of a detached session. No Python."""
