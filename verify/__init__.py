"""Programs that look for faults that tests do not find, with locks under faults, and the engine under virtual time."""
