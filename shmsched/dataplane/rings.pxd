cimport cython


cdef class TokenWriter:
    cdef public object _bytes
    cdef public long long capacity
    cdef public long long written
    cdef public long long read

    @cython.locals(size="long long", written="long long", at="long long", first="long long")
    cpdef long long put(self, bytes tokens) except -1

    cpdef returned(self, read)


cdef class RecordReader:
    cdef public object _bytes
    cdef public long long _row_size
    cdef public long long capacity
    cdef public long long read

    @cython.locals(n="long long", at="long long", size="long long", first="long long", rows=bytes)
    cpdef bytes rows_until(self, written)
