cdef enum:
    NEVER = 1073741824
    NOTHING = 0
    FEWEST_PLACES = 16

    NOWHERE = -1
    IN_LINE = -2
    LATE = -3
