cimport cython

from shmsched.dataplane.session_core cimport SessionCore
from shmsched.dataplane.rings cimport RecordReader, TokenWriter
from shmsched.dataplane.submission cimport PendingResult, Submission


cdef class ClientPort:
    cdef public object lock
    cdef public tuple decided
    cdef public Submission entering
    cdef public tuple leaving
    cdef public list wait_for_room
    cdef public object dead
    cdef public object arena
    cdef public list waiting
    cdef public long long waiting_tokens
    cdef public dict pending
    cdef public dict held_rows
    cdef public long long results_taken
    cdef public object _link
    cdef public TokenWriter _ring
    cdef public RecordReader _records
    cdef public RecordReader _results
    cdef public RecordReader _stream
    cdef public long long _most_tokens
    cdef public long long _next_request
    cdef public set _ids
    cdef public object _next_id

    @cython.locals(entering=Submission)
    cpdef finish(self)

    @cython.locals(session=SessionCore, first="long long", last="long long", start="long long")
    cpdef enter(self, Submission submission, PendingResult reply)

    @cython.locals(first="long long", last="long long", request="long long", session=SessionCore, pending=dict, waiting=list)
    cdef _entered(self, Submission submission)

    cpdef check_alive(self)

    @cython.locals(n="long long", n_steps="long long", n_results="long long", cells="long long", outstanding="long long", ring=TokenWriter, records=RecordReader, results=RecordReader)
    cdef _lacking(self, Submission submission)

    @cython.locals(waiting=list, described=list, laid=list, stops=list, submission=Submission, written="long long")
    cpdef send_steps(self)

    @cython.locals(tokens="long long", submission=Submission)
    cdef _leave(self)

    @cython.locals(pending=dict, outstanding_ids=set, submission=Submission)
    cpdef settled(self, list requests, list ids)
