"""When: one pure machine decides what a step does; whoever performs it is an executor.

moments in                                    actions out
a unit's forward is entered, left, raised     gather, wait, wake, forward, rest, keep, free
its backward is entered, left                 gather, wait, backward, take, free, finish, reduce
a gradient arrived outside of that            refuse, or nothing until the end
the step ends, is abandoned                   take, reduce, finish, place, free

Nothing here imports torch or does I/O.
"""
