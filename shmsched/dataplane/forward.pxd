cimport cython


cdef class EngineSlot:
    cdef public object buffer
    cdef public long long ids_offset
    cdef public long long logprobs_offset
    cdef public long long statuses_offset
    cdef public long long steps_offset
    cdef public object tokens

    @cython.locals(n_steps="long long", n_tokens="long long", at="long long")
    cpdef Batch pull(self, number)

    cpdef put(self, Outcome outcome)


cdef class Batch:
    cdef public bint each_has_one
    cdef public list lengths
    cdef public long long n
    cdef public list n_rows
    cdef public bytes packed
    cdef public list places
    cdef public list positions
    cdef public frozenset raw
    cdef public list slots
    cdef public object tokens

    cpdef bint is_one_pass(self, held) except -1


cdef class Pass:
    cdef public Batch batch
    cdef public list lengths
    cdef public long long n_outputs
    cdef public tuple places
    cdef public list positions
    cdef public object raw
    cdef public list rows
    cdef public list slots
    cdef public object steps
    cdef public object tokens

    @cython.locals(batch=Batch, steps=list, starts=list, behind="long long")
    cdef _pack(self, list rows)

    cpdef tuple outputs(self)

    @cython.locals(batch=Batch, lengths=list, tokens=list, owners=list, within=list, at="long long", end="long long", n="long long")
    cdef tuple _lay_out(self)

    @cython.locals(positions=list, lengths=list)
    cpdef advance(self, dict held)


cdef class Outcome:
    cdef public Batch batch
    cdef public object ids
    cdef public object logprobs
    cdef public dict messages
    cdef public object statuses
    cdef public dict stopped

    cpdef done(self, Pass this, ids, logprobs)

    @cython.locals(batch=Batch, sizes=list, places=list, at="long long", place="long long", size="long long")
    cdef _note(self, Pass this, ids, logprobs)

    cpdef bint all_done(self) except -1
