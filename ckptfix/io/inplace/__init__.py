"""Files that are changed where they are: a journal first, then the few bytes that differ, and a way back."""
