"""Functions that read locks from outside and act on them. The admin, the commands and the monitoring use them."""
