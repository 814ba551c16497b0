cimport cython

from shmsched.dataplane.client_port cimport ClientPort
from shmsched.dataplane.session_core cimport SessionCore
from shmsched.dataplane.rings cimport RecordReader
from shmsched.dataplane.submission cimport PendingResult, Submission


cdef class News:
    cdef public list answered
    cdef public list failed
    cdef public list streamed
    cdef public list raw
    cdef public list freed
    cdef public list requests
    cdef public list ids
    cdef public long long results
    cdef public long long taken


cdef class RawAnswer:
    cdef public Submission submission
    cdef public long long n_rows
    cdef public long long at
    cdef public object lease


cdef class Streamed:
    cdef public object stream
    cdef public SessionCore session
    cdef public list tokens
    cdef public long long n
    cdef public long long position

    cpdef put(self)


cdef class Answers:
    cdef public ClientPort _port
    cdef public RecordReader _records
    cdef public RecordReader _results
    cdef public RecordReader _stream
    cdef public object _clock
    cdef public long long _stream_told
    cdef public long long _stream_quarter
    cdef public object _news

    @cython.locals(port=ClientPort)
    cpdef completions(self, message)

    @cython.locals(port=ClientPort, stream=RecordReader, records=bytes, results=bytes, streamed=bytes, news=News, n_records="long long", n_results="long long", n_streamed="long long")
    cdef _take(self, message)

    @cython.locals(pending=dict, answered=list, requests=list, ids=list, i="long long", at="long long", n_results="long long", n_rows="long long", kind="long long", submission=Submission, reply=PendingResult)
    cdef _read_records(self, News news, bytes records, bytes results)

    @cython.locals(pending=dict, rows_of=dict, waits=dict, submission=Submission, stream=PendingResult)
    cdef _read_stream(self, News news, bytes streamed)

    @cython.locals(port=ClientPort, streamed=Streamed, raw=RawAnswer)
    cpdef _completed(self, News news, long long n_records, long long n_results, long long n_streamed)

    @cython.locals(submission=Submission)
    cdef _lease(self, RawAnswer raw, list answered)

    cpdef tell(self, News news)

    @cython.locals(news=News, streamed=Streamed, futures=list, reply=PendingResult, failed=PendingResult)
    cpdef give_out(self)
