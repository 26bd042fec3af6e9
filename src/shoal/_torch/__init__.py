"""The one adapter: every private corner of torch that shoal leans on is named in this folder.

Tested on torch 2.11 and 2.13, so that a new torch release breaks this folder and no other. Callers
import the file that they need: `from shoal._torch import autograd`.
"""
