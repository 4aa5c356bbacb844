"""Programs that look for what tests do not find: locks under faults, and the engine under virtual time."""
