"""Pages to read in a browser, and to send: each one HTML file that needs nothing else, neither network nor scripts.

The tables are HTML as they stand. The script of the page sorts, searches and folds them, and draws the histograms,
which are JSON. All text comes from untrusted files: it is escaped in `text`, and nowhere else is HTML made of it.
"""
