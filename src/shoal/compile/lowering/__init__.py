"""Units as graph nodes: a unit and the machine's settings in, a gather and a reduction out."""
