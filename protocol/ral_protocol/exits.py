"""Exit statuses and names that the client, the broker and the documentation share. Imports nothing."""

VERSION = "0.1.0"
"""Version of the package; the one place where it is written."""

PROTOCOL = 1
"""Number of the wire protocol. A peer with another number is refused with a sentence."""

OK = 0
FAILED = 1
"""A command other than run and exec was refused or failed."""
USAGE = 2
UNAVAILABLE = 69
"""No broker can be reached or started (EX_UNAVAILABLE of sysexits.h)."""
REFUSED = 78
"""ral itself refused to run the program, or no start was reported (EX_CONFIG of sysexits.h)."""
CANNOT_EXECUTE = 126
NOT_FOUND = 127
SIGNALLED = 128
"""Added to the number of the signal that ended the program."""
LOST = 137
"""The status of a session whose end nobody could record; stderr and JSON say ``lost``."""

SOCKET_NAME = "control.sock"
"""The user's door in the runtime directory."""
SESSIONS_DIR = "sessions"
"""Directory of records, status files, attach sockets and logs below the runtime directory."""
SESSION_MARKER = "/run/ral-session"
"""A symbolic link inside every sandbox whose target is the session's id."""
SESSION_VARIABLE = "RAL_SESSION"
"""Environment variable inside every sandbox: the session's id."""
RUNTIME_VARIABLE = "RAL_RUNTIME_DIR"
"""Environment variable that names another runtime directory."""
