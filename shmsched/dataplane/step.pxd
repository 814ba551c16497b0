cimport cython

from shmsched.dataplane cimport marks


cdef class QueuedStep:
    cdef public object number
    cdef public object session
    cdef public long long n_tokens
    cdef public object state
    cdef public long long rank
    cdef public Lane lane
    cdef public QueuedStep before
    cdef public QueuedStep after
    cdef public QueuedStep ahead
    cdef public QueuedStep behind
    cdef public long long spot


cdef class Lane:
    cdef public object session
    cdef public QueuedStep head
    cdef public QueuedStep tail
    cdef public long long n_chunks
    cdef public long long place
    cdef public long long last_chunk
    cdef public bint vacated

    @cython.locals(last=QueuedStep)
    cpdef append(self, QueuedStep step)

    @cython.locals(first=QueuedStep)
    cpdef prepend(self, QueuedStep step)

    @cython.locals(before=QueuedStep, after=QueuedStep)
    cpdef unlink(self, QueuedStep step)

    @cython.locals(head=QueuedStep)
    cpdef long long offer(self)
