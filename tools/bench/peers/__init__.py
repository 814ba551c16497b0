"""The contestants, a module for each transport. ``start(plan, crew, stack)`` starts its processes and its clients.

What is started is ended by ``stack``, or ends with the host's process. Returns the daemon's socket, where there is one.
"""
