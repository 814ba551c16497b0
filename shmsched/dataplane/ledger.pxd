cimport cython

from shmsched.dataplane.step cimport QueuedStep


cdef class Ledger:
    cdef public long long submitted
    cdef public long long queued
    cdef public long long in_flight
    cdef public long long completed
    cdef public long long failed
    cdef public long long cancelled
    cdef public long long ignored

    cpdef enter(self, QueuedStep step)

    cpdef enter_many(self, long long n)

    @cython.locals(step=QueuedStep, in_flight=object)
    cpdef dispatch(self, list steps)

    cpdef bint requeue(self, QueuedStep step) except -1

    cpdef bint complete(self, QueuedStep step) except -1

    @cython.locals(step=QueuedStep, in_flight=object, completed=object, end="long long", at="long long")
    cpdef long long complete_run(self, list steps, bytes statuses, long long first, long long done) except -1

    cpdef bint fail(self, QueuedStep step) except -1

    cpdef bint cancel(self, QueuedStep step) except -1

    cpdef ignore(self)

    cdef bint _close(self, QueuedStep step, outcome) except -1
