cimport cython

from shmsched.dataplane cimport marks
from shmsched.dataplane.step cimport Lane


cdef class Rotation:
    cdef public list at
    cdef public list sizes
    cdef public long long half
    cdef public long long front
    cdef public long long next

    cpdef offer(self, Lane lane, long long size)

    cpdef to_back(self, Lane lane)

    @cython.locals(place="long long")
    cpdef leave(self, Lane lane)

    @cython.locals(sizes=list, half="long long", node="long long")
    cpdef Lane first_from(self, long long start, long long room)

    @cython.locals(present=list)
    cdef _join(self, Lane lane)

    @cython.locals(sizes=list, node="long long", smallest="long long", right="long long")
    cdef _set(self, long long place, long long size)

    @cython.locals(n="long long", half="long long", node="long long", place="long long", sizes=list, at=list)
    cdef _lay_out(self, list lanes, list offers)
