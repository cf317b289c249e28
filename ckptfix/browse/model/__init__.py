"""The data of the browser, separate from its display: plain Python, without the drawing package."""
