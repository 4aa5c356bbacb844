"""What one process does with the locks of one store."""
