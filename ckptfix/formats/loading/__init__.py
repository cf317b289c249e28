"""The code that runs when a program unpickles a file, and what it refuses or fails on. Nothing is imported or run."""
