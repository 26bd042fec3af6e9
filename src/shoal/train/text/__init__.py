"""Text of any kind made into one file of tokens, which all ranks read at random."""
