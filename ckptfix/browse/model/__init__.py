"""What is browsed, apart from how it is shown: plain Python, without the package that draws."""
