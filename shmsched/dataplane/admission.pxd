cimport cython

from shmsched.dataplane.core cimport Core
from shmsched.dataplane.session cimport ClientPort, EnginePort, Generation, Session, Step, StepSpec


cdef class Admission:
    cdef public Core core

    @cython.locals(
        core=Core, tokens=bytes, now=double, highest="long long", sessions=dict, specs=dict, engine=EnginePort, steps=list,
        at="long long", begin="long long", stops="long long", n_results="long long", available="long long",
        request="unsigned long long", n_tokens="long long", position="long long", wanted=bytes, spec=StepSpec, session=Session,
        taken=bytes, n_rows="long long", step=Step,
    )
    cpdef admit(self, ClientPort client, frame)

    cdef _enter(self, ClientPort client, EnginePort engine, list steps, long long n_results, double now)

    @cython.locals(engine=EnginePort, generation=Generation, end="long long")
    cdef _check(self, ClientPort client, session_id, Session session, long long n_tokens, long long position, StepSpec spec, bytes tokens, long long highest)

    cdef StepSpec _read_spec(self, ClientPort client, bytes wanted, tuple stop_tokens)

    cdef _check_room(self, ClientPort client, frame, n_tokens)
