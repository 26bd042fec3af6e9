"""The compiler: what is captured ahead of time, and how it runs."""
