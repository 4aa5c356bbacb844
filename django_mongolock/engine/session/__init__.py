"""The runtime of the locks of one store in one process."""
