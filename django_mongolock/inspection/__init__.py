"""Reading locks from outside, and acting on them: the basis of the admin, the commands and the monitoring."""
