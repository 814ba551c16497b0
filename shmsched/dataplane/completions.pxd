cimport cython

from shmsched.dataplane.batches cimport Batch
from shmsched.dataplane.core cimport Core
from shmsched.dataplane.ledger cimport Ledger
from shmsched.dataplane.session cimport ClientPort, EnginePort, Generation, Session, Step, StepSpec


cdef class Completions:
    cdef public Core core

    @cython.locals(
        core=Core, steps=list, ids=list, logprobs=list, started=double, end="long long", now=double, at="long long",
        client=ClientPort, answers=list, place="long long", step=Step, session=Session, spec=StepSpec, n="long long",
        waited=double, follower=Step,
        generation=Generation, n_followers="long long",
    )
    cpdef long long complete(self, Batch batch, long long first) except -1

    @cython.locals(core=Core, session=Session, client=ClientPort, spec=StepSpec, position="long long", follower=Step)
    cdef Step _follow(self, Step step, token, double logprob, double waited, double now)

    @cython.locals(steps=list)
    cpdef long long fail_from(self, Session session, first, position, code, message) except -1

    cpdef fail_session(self, Session session, code, message)

    @cython.locals(ledger=Ledger, step=Step, session=Session)
    cdef _settle(self, steps, code, message)
