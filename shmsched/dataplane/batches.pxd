cimport cython

from shmsched.dataplane.session cimport Generation, Session, Step, StepSpec


cdef class Batch:
    cdef public list after
    cdef public long long answered
    cdef public list came
    cdef public double deadline
    cdef public dict followers
    cdef public bint generates
    cdef public list given
    cdef public list ids
    cdef public list logprobs
    cdef public object messages
    cdef public long long n_decodes
    cdef public long long n_results
    cdef public long long n_tokens
    cdef public unsigned long long number
    cdef public list places
    cdef public bint raw
    cdef public long long size
    cdef public double started
    cdef public bytes statuses
    cdef public list steps

    @cython.locals(after=list, places=list, place="long long")
    cpdef begin(self, dict followers, double now)

    cpdef long long n_results_of(self, long long at) except -1

    cpdef take_answers(self, bytes statuses, list ids, list logprobs, messages)


cdef class BatchSlot:
    cdef public object buffer
    cdef public object ids
    cdef public object logprobs
    cdef public long long statuses_at
    cdef public long long steps_at
    cdef public long long tokens_at
    cdef public long long vocab_size

    @cython.locals(
        steps=list, entries=list, tokens=list, start="long long", n_decodes="long long", n_results="long long", raw=bint,
        generates=bint, at="long long", step=Step, spec=StepSpec, n="long long", session=Session,
    )
    cpdef write(self, Batch batch)

    @cython.locals(entries=list, at="long long", step=Step, session=Session)
    cpdef write_following(self, unsigned long long number, list steps, list places)

    @cython.locals(table=bytes, n="long long")
    cdef _put(self, unsigned long long number, list entries, bytes tokens)

    @cython.locals(at="long long", n_steps="long long", n="long long", n_done="long long", statuses=bytes, ids=list)
    cpdef bint read(self, Batch batch, messages) except -1

    cdef _check_answers(self, Batch batch, bytes statuses, list ids)


cdef class BatchesInFlight:
    cdef public Batch following
    cdef public unsigned long long given
    cdef public unsigned long long given_ahead
    cdef public long long max_decodes
    cdef public Batch running
    cdef public list slots

    @cython.locals(batch=Batch, slot=BatchSlot)
    cpdef Batch give(self, double now, list steps)

    @cython.locals(following=Batch, after=list, steps=list, k="long long", step=Step, generation=Generation, room="long long", slot=BatchSlot)
    cpdef give_ahead(self, Batch batch)

    @cython.locals(batch=Batch)
    cpdef Batch take_back(self, number)

    cpdef put_back(self, Batch batch)

    cpdef bint read(self, Batch batch, messages) except -1

    @cython.locals(batch=Batch)
    cpdef list go_on(self, dict followers, double now)

    cpdef Batch clear(self)
