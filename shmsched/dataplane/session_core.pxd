cimport cython


cdef class SessionCore:
    cdef public object session_id
    cdef public object model
    cdef public object engine
    cdef public object seed
    cdef public object options
    cdef public object ended
    cdef public object unfed
    cdef public object rewinds
    cdef public long long vocab_size
    cdef public long long chunk_size
    cdef public long long most_tokens
    cdef public bint supports_rewind
    cdef public long long _position
    cdef public object _fed
    cdef public object _stream
    cdef public object _course
    cdef public list _rewinds
    cdef public bint _fell_back
    cdef public object _held
    cdef public object _sampling
    cdef public bytes _packed

    cpdef check_open(self)

    cpdef check_free(self, course)

    @cython.locals(stands_at="long long", start="long long")
    cpdef long long placed(self, position, long long n_tokens) except -1

    cpdef bytes packed(self, sampling)

    cpdef goes_on(self, request, long long start, bytes tokens)

    cpdef was_fed(self, long long position, list tokens)

    cpdef rewound(self, request, long long position)
