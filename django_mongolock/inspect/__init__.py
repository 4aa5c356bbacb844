"""Reading locks from outside, and acting on them: what the admin, the commands and the monitoring stand on."""
