"""Bytes in and out."""
