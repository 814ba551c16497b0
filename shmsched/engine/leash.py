"""What daemon and keeper say to each other on the socket between them. That it is closed says the most: the engine is to end."""

import struct

PID = struct.Struct("<I")
"""From the engine's process, its number."""
STOP = b"T"
"""From the daemon, to have the engine sent SIGTERM."""
