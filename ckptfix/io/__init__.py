"""Reading and writing of bytes."""
