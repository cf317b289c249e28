"""Reports for a browser: each page is a single HTML file that needs nothing else, neither network nor scripts.

The tables are plain HTML. The page's script sorts, searches and folds them, and draws the histograms, which are JSON.
All text comes from untrusted files: only `text` escapes it, and nothing else makes HTML from it.
"""
