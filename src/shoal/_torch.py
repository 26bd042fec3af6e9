"""The one adapter: every private corner of torch that shoal leans on is named here.

Tested on torch 2.11 and 2.13, so that a new torch release breaks this file and no other.
"""
