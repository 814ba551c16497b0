"""Numbers that stand for something. Compiled modules take them from ``marks.pxd``, where they are C constants."""

NEVER = 2**30
"""The size that a session offers whose turn it is not: no chunk is as large, and none of its size fits. The place is kept."""
NOTHING = 0
"""The size that a session offers which has no chunk, and leaves once a pass comes to it. It fits any room."""
FEWEST_PLACES = 16

NOWHERE = -1
"""Where a step stands in the line of decodes: not in it,"""
IN_LINE = -2
"""between its neighbours,"""
LATE = -3
"""or among those whose place is found once they are about to go."""
