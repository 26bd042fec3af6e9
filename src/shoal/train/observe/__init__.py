"""Other ways to look at a run: loggers of others, a profiled window, news of compilations."""
