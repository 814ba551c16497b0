cimport cython

from shmsched.dataplane.queues cimport StepQueues
from shmsched.dataplane.step cimport QueuedStep


cdef class Generation:
    cdef public long long further
    cdef public frozenset stop_tokens


cdef class StepSpec:
    cdef public double deadline
    cdef public bytes entry
    cdef public Generation generation
    cdef public bint more
    cdef public long long output_rows
    cdef public object rows_offset
    cdef public bint sampled
    cdef public str wrong


cdef class Step(QueuedStep):
    cdef public double entered
    cdef public long long n_rows
    cdef public long long position
    cdef public unsigned long long request
    cdef public StepSpec spec
    cdef public bytes tokens


cdef class Session:
    cdef public ClientPort client
    cdef public object client_id
    cdef public object cut_off
    cdef public EnginePort engine
    cdef public str model
    cdef public long long next_position
    cdef public object number
    cdef public bytes options
    cdef public dict outstanding
    cdef public bint patient
    cdef public long long slot
    cdef public object state

    @cython.locals(step=Step)
    cpdef Step add(self, number, unsigned long long request, long long n_tokens, long long n_rows, bytes tokens, long long position, StepSpec spec, double now)


cdef class EnginePort:
    cdef public object linger
    cdef public long long max_chunk
    cdef public long long max_session_tokens
    cdef public str model
    cdef public StepQueues queues
    cdef public object rewinds
    cdef public long long vocab_size


cdef class ClientPort:
    cdef public list answers
    cdef public object arena
    cdef public bint awaited
    cdef public object blame
    cdef public bint closed
    cdef public unsigned long long last_request
    cdef public object number
    cdef public long long outstanding
    cdef public long long outstanding_results
    cdef public object records
    cdef public object results
    cdef public object ring
    cdef public dict sessions
    cdef public dict specs
    cdef public object stream
    cdef public unsigned long long stream_read
    cdef public list token_answers
    cdef public dict unstreamed

    cpdef answered(self)

    cpdef bint streamed(self, Step follower, token, double logprob, double waited) except -1

    cpdef settled_without_answer(self, Step step)
