"""What each rank of a job saved for itself, in files of its own."""
