"""One command on many inputs: the inputs, a job for each, and the processes that do them."""
