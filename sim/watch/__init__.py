"""Runs that are looked at: a board in the terminal, a metrics endpoint, a series in a file.

All three ask an `Observer`, which reads the rows that a run leaves behind anyway. So a look costs
when it is taken, not a step, and changes nothing of the run.
"""
