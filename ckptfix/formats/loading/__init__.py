"""What a program that unpickles a file runs, refuses, or fails on. Nothing is imported or called to find out."""
