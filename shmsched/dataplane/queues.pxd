cimport cython

from shmsched.dataplane cimport marks
from shmsched.dataplane.line cimport Line
from shmsched.dataplane.rotation cimport Rotation
from shmsched.dataplane.step cimport Lane, QueuedStep


cdef class StepQueues:
    cdef public dict alone
    cdef public dict chunk_lanes
    cdef public dict decode_lanes
    cdef public bint exclusive
    cdef public long long first_rank
    cdef public long long last_rank
    cdef public Line line
    cdef public long long max_decodes
    cdef public long long max_tokens
    cdef public long long queued
    cdef public long long queued_chunks
    cdef public Rotation rotation
    cdef public long long vacancies

    cpdef push(self, QueuedStep step)

    @cython.locals(alone=dict, lanes=dict, line=Line, step=QueuedStep, session=object, rank="long long")
    cpdef extend(self, steps)

    @cython.locals(lane=Lane)
    cpdef push_front(self, QueuedStep step)

    @cython.locals(lanes=dict, lane=Lane)
    cpdef bint remove(self, QueuedStep step) except -1

    @cython.locals(steps=list, alone=QueuedStep, lane=Lane)
    cpdef list drop_session(self, session)

    @cython.locals(decodes=list, chunks=list, found_vacant=list, asked="long long", lane=Lane)
    cpdef hand_over(self, build)

    @cython.locals(alone=dict, step=QueuedStep, lane=Lane)
    cdef _take_decodes(self, list decodes)

    @cython.locals(step=QueuedStep, lane=Lane)
    cdef _take_chunks(self, list chunks, long long asked)

    @cython.locals(lane=Lane, step=QueuedStep, following=QueuedStep, asked="long long")
    cdef long long _select_chunks(self, long long room, list chunks, list found_vacant) except -1

    @cython.locals(lane=Lane)
    cdef _push_into_lane(self, QueuedStep step)

    cdef _count_chunk(self, Lane lane)

    @cython.locals(session=object, lanes=dict, lane=Lane, alone=QueuedStep)
    cdef Lane _lane_for(self, QueuedStep step)

    @cython.locals(head=QueuedStep)
    cdef _show_head(self, Lane lane)

    @cython.locals(step=QueuedStep)
    cdef _drain(self, Lane lane, list steps)

    cdef _end_vacancy(self, Lane lane)

    @cython.locals(lane=Lane)
    cdef _end_vacancies(self)
