"""Files in object stores, on the hub and on web servers: read by ranges, written by parts."""
