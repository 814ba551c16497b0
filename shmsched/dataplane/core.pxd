cimport cython

from shmsched.dataplane.ledger cimport Ledger
from shmsched.dataplane.session cimport EnginePort


cdef class Core:
    cdef public object clock
    cdef public Ledger ledger
    cdef public object numbers
    cdef public set touched_clients
    cdef public set touched_engines
    cdef public object watch

    cpdef queue(self, EnginePort engine, list steps, double now)
