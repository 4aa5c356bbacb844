"""The engine's real code in one thread, under virtual time and one seed that decides everything.

The engine keeps its decisions apart from what waits: protocols are generators, and only a thin shell (threads, queues,
wake-ups, the store) blocks. Here that shell is replaced, and nothing else: `kernel` runs one strand at a time, `shell`
stands in for threads, and `server` for a replica set, which applies the rule in Python. `world` has processes do what
those of the fault runs do, `faults` breaks things, and the checker of the fault runs judges what they wrote down.

The idea is that of FoundationDB's simulation: https://apple.github.io/foundationdb/testing.html
"""
