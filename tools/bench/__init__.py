"""``shmsched bench``: shmsched beside other ways to do the same job, in alternating runs on this machine.

Every way is a *contestant*: client processes, a scheduler process with the in-process ``Scheduler``, an engine process that
answers as ``echo``. The clients' loops are the same code for all (``load.py``); only what carries a step differs (``peers/``).
"""
