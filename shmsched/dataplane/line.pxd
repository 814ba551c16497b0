cimport cython

from shmsched.dataplane cimport marks
from shmsched.dataplane.step cimport QueuedStep


cdef class Line:
    cdef public QueuedStep first
    cdef public QueuedStep last
    cdef public dict late
    cdef public list heap
    cdef public long long n

    @cython.locals(last=QueuedStep)
    cpdef append(self, QueuedStep step)

    @cython.locals(first=QueuedStep, last=QueuedStep)
    cpdef add(self, QueuedStep step)

    @cython.locals(spot="long long", ahead=QueuedStep, behind=QueuedStep)
    cpdef remove(self, QueuedStep step)

    @cython.locals(steps=list, heap=list, step=QueuedStep, late=QueuedStep)
    cpdef list head(self, long long most)

    @cython.locals(step=QueuedStep, rest=QueuedStep, nowhere="long long")
    cpdef cut(self, list steps)

    @cython.locals(ahead=QueuedStep)
    cdef _insert(self, QueuedStep step, QueuedStep behind)

    @cython.locals(heap=list, step=QueuedStep)
    cdef QueuedStep _first_late(self)
