"""What the stress tool is made of: client processes that run closed loops and check every answer, and their parent."""
