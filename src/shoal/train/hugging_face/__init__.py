"""Models of Hugging Face: built without memory, filled unit by unit."""
