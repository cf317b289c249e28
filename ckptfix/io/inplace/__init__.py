"""In-place edits of files: a journal first, then the few bytes that differ, and a way to undo them."""
