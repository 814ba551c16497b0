cimport cython

from shmsched.dataplane.session_core cimport SessionCore


cdef class PendingResult:
    cdef public object last_request
    cdef public bint streams
    cdef public bint withdrawn
    cdef public object queue_wait
    cdef public double arrived


cdef class Submission:
    cdef public SessionCore session
    cdef public object position
    cdef public object sampling
    cdef public object output_rows
    cdef public double deadline
    cdef public object course
    cdef public object request_id
    cdef public object id
    cdef public PendingResult reply
    cdef public long long first_request
    cdef public long long last_request
    cdef public long long start
    cdef public bytes tokens
    cdef public bytes described
    cdef public tuple stop_tokens
    cdef public long long further
    cdef public long long n_tokens
    cdef public long long n_steps
    cdef public long long n_rows
    cdef public long long raw_rows
    cdef public long long n_results
    cdef public long long rows_offset
    cdef public long long tokens_then
    cdef public long long results_then

    cpdef long long position_of(self, long long request) except -1

    @cython.locals(session=SessionCore, flags="long long", before="long long", last="long long", rows_offset="long long", request="long long")
    cpdef bytes describe(self)
