"""Peers that speak the protocol by hand: all that tests know of frames and of the layout of shared memory is in here."""
