"""Features trained in every way that the columns of `docs/compose.md` name, beside one process."""
